"""What a run refuses before a model is loaded, and how it stops where a number is not finite."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from rft.algorithm import ADVANTAGES, LOSSES
from rft.data.encode.tokenizer import characters
from rft.rollout.engine.hf import HFEngine
from rft.setup.assembly import Job
from tests.helpers import ALPHABET
from tests.rollout.contexts import engine_check_context


@pytest.fixture
def refused(tiny, monkeypatch, tmp_path):
    """What a job says that must not come as far as a model or a run folder."""
    monkeypatch.setattr("rft.actor.model.load_with_head", lambda *_: pytest.fail("a model was loaded"))

    def run(*overrides, change=lambda config: None):
        config = tiny(*overrides)
        change(config)
        with pytest.raises(ValueError) as caught:
            Job(config).fit("")
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    return run


def put(path, value):
    """A change of a resolved config that the command line could not make."""

    def change(config):
        *parents, last = path.split(".")
        for key in parents:
            config = config[key]
        config[last] = value

    return change


def test_a_number_out_of_its_range(refused):
    said = refused("algorithm.loss.clip_low=-0.2")
    assert said == "algorithm.loss.clip_low=-0.2: it must be at least 0"


@pytest.mark.parametrize(("rows", "refuses"), [(19, False), (22, False), (23, True)])
def test_more_ids_without_a_token_than_an_engine_forbids(rows, refuses, tiny, monkeypatch):
    monkeypatch.setattr(HFEngine, "facts", replace(HFEngine.facts, most_forbidden=3))
    model, tokenizer, job = Qwen3Config(vocab_size=rows), characters(alphabet=ALPHABET), Job(tiny())
    if not refuses:
        job.check_engine_model(model, tokenizer, None)
        return
    said = r"^actor\.path: 4 ids of the model .*, and HFEngine forbids at most 3; set .*, or give the model 19 rows "
    with pytest.raises(ValueError, match=said):
        job.check_engine_model(model, tokenizer, None)


def test_dynamic_sampling_of_groups_of_one(refused):
    said = refused("algorithm=reinforce", "algorithm/source=dynamic_sampling", "algorithm.group_size=1")
    assert said.startswith("algorithm.group_size=1: a group of one never differs")


def test_a_margin_that_nobody_reads(refused):
    said = refused("algorithm=dpo", "algorithm.source.margin=gap")
    assert said == "algorithm.source.margin=gap: no function reads 'margin'; set it to null"


def test_a_loss_of_pairs_without_pairs(refused):
    said = refused("algorithm=dpo", "algorithm/source=dataset")
    assert said.startswith("algorithm.loss reads the column 'chosen', which nothing before it writes")


def test_a_tracked_term_that_there_is_not(refused):
    said = refused("algorithm=spo", "algorithm.source.tracking.term=fromat")
    assert (
        said.startswith("algorithm.source.tracking.term=fromat: none of reward.terms") and "did you mean format" in said
    )


def test_a_reward_model_that_nothing_reads(refused):
    said = refused("algorithm/prm_loss=implicit_reward", "algorithm.prm_loss.beta=0.05")
    assert said.startswith("algorithm.prm_loss trains the prm, but nothing reads its prm_logprobs")


def test_a_name_that_is_not_registered(refused):
    said = refused(change=put("algorithm.loss.name", "ppo_clp"))
    assert said.startswith("algorithm.loss.name: no loss is called 'ppo_clp'; did you mean ppo_clip?")


def test_an_option_that_is_missing(refused):
    said = refused(change=lambda config: config["algorithm"]["loss"].pop("clip_high"))
    assert said == "algorithm.loss.clip_high is missing: loss 'ppo_clip' needs it; add `clip_high: <number>`"


def test_a_model_option_that_transformers_would_ignore(refused):
    said = refused(change=put("actor.model_config.hidden_sise", 32))
    assert said == "actor.model_config.hidden_sise: a qwen3 has no such option; did you mean hidden_size?"
    said = refused(change=put("critic.model_config", {"model_type": "qwen33"}))
    assert said == "critic.model_config.model_type=qwen33: transformers has no such type; did you mean qwen3?"


@pytest.mark.parametrize(
    ("overrides", "key", "column"),
    [
        (["algorithm=sft", "algorithm/loss=ppo_clip"], "algorithm.loss", "advantages"),
        (["algorithm=sft", "algorithm/advantage=reinforce_pp"], "algorithm.advantage", "scores"),
        (["algorithm=sft", "algorithm.old_logprobs=rollout", "algorithm/loss=gspo"], "algorithm.old_logprobs",
         "rollout_logprobs"),
    ],
)  # fmt: skip
def test_a_column_that_nothing_writes(overrides, key, column, refused):
    said = refused(*overrides)
    assert said.startswith(f"{key} reads the column {column!r}, which nothing before it writes (there are: ")
    assert f"choose another {key}" in said


def test_a_critic_that_nothing_trains(refused):
    said = refused("algorithm/advantage=gae")
    assert said.startswith("something reads values, but algorithm.critic_loss is null")


def test_batch_sizes_that_do_not_divide(refused):
    assert refused("batch.minibatches=3") == (
        "batch.minibatches=3 does not divide the 16 rows of a step (batch.prompts=4 x algorithm.group_size=4); "
        "choose a divisor"
    )


def test_a_critic_that_trains_alone_to_the_end(refused):
    assert refused("algorithm=ppo", "algorithm.critic_warmup=3") == (
        "algorithm.critic_warmup=3: the policy would train in none of the steps=3; raise steps or lower "
        "algorithm.critic_warmup"
    )
    assert "algorithm.critic_warmup=10: " in refused("algorithm=vapo")


@pytest.mark.parametrize("advantage", ["group_norm", "dr_grpo", "rloo", "group_norm_batch"])
def test_a_group_of_one_has_no_baseline(advantage, refused):
    said = refused(f"algorithm/advantage={advantage}", "algorithm.group_size=1")
    assert said.startswith("algorithm.group_size=1: the advantage ")
    assert "set algorithm.group_size to 2 or more" in said


def test_a_group_of_one_is_enough_without_a_baseline(resolved):
    Job(resolved("algorithm=reinforce_pp", "algorithm.group_size=1"))


def test_dynamic_sampling_looks_at_a_term_that_there_is(refused):
    said = refused("algorithm=dapo", "algorithm.source.redraw.term=exact_mtach")
    assert said.startswith("algorithm.source.redraw.term=exact_mtach: none of reward.terms")
    assert said.endswith("did you mean exact_match?")


def test_more_passes_than_samples(refused):
    assert refused("eval.samples=2", "eval.pass_k=[1,4]").startswith("eval.pass_k=[1, 4] asks for more answers than")
    assert refused("eval.pass_k=[1]").startswith("eval.pass_k=[1] asks for more answers than eval.samples=0")


@pytest.mark.parametrize(("samples", "ks"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_without_pass_k_every_number_of_samples_has_its_powers_of_two(samples, ks, resolved):
    assert Job(resolved(f"eval.samples={samples}")).run.eval.ks() == ks


@pytest.mark.parametrize("wrong", ["eval/test/accuracy", "eval/heldout/acuracy", "eval/heldout/pass@1", "reward/mean"])
def test_a_metric_that_the_run_will_not_have(wrong, refused):
    said = refused(f"metric={wrong}")
    assert said.startswith(f"metric={wrong}: the run has no such metric")
    assert said.endswith("(known: eval/heldout/accuracy, eval/heldout/exact_match, eval/heldout/length)")


def test_a_temperature_of_zero_samples_nothing(refused):
    assert refused("rollout.temperature=0") == (
        "rollout.temperature=0: it must be at least 0.01; the greedy evaluation needs no temperature"
    )


def lines(path):
    return {
        "_target_": "rft.data.rows.sources.FileRows",
        "path": str(path),
        "columns": {"prompt": "question"},
        "schema": None,
        "limit": None,
    }


def test_a_data_file_that_is_not_there(refused, tmp_path):
    said = refused(change=put("data.train", lines(tmp_path / "no.jsonl")))
    assert said.startswith(f"data.train.path={tmp_path / 'no.jsonl'}: there is no such file")


def test_an_empty_data_file(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    said = refused(change=put("data.eval.heldout", lines(tmp_path / "rows.jsonl")))
    assert said == f"data.eval.heldout.path: {tmp_path / 'rows.jsonl'} holds no rows"


def test_a_row_without_the_field_that_the_reward_needs(refused, tmp_path):
    rows = [{"question": "1=", "answer": "1"}, {"question": "2=", "anwser": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused("warmup=none", change=put("data.train", lines(tmp_path / "rows.jsonl")))
    assert said.startswith(f"{tmp_path / 'rows.jsonl'} line 2: no field 'answer' (known: question, anwser")
    assert "data.train.columns.answer=" in said


def test_a_row_without_the_field_that_the_warmup_imitates(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1=", "answer": "1"}))
    said = refused(change=put("data.train", lines(tmp_path / "rows.jsonl")))
    assert said.startswith(f"{tmp_path / 'rows.jsonl'} line 1: no field 'demonstration'")


def test_a_prompt_that_is_longer_than_the_context(refused):
    said = refused("actor.model_config.max_position_embeddings=18")
    assert said.startswith("data.train: the prompt of row ")
    assert "has 13 tokens; with rollout.max_new_tokens=6 that is over the model's context of 18" in said


def test_a_held_out_prompt_that_is_longer_than_the_context(refused):
    said = refused("actor.model_config.max_position_embeddings=19", "data.eval.heldout.length=[5,5]")
    assert said.startswith("data.eval.heldout: the prompt of row ")
    assert "has 14 tokens; with rollout.max_new_tokens=6 that is over the model's context of 19" in said


def test_a_context_that_is_just_long_enough(tiny):
    Job(tiny("actor.model_config.max_position_embeddings=19", "steps=1", "warmup=none")).fit("")


def test_a_model_path_that_does_not_exist(refused, tmp_path):
    missing = tmp_path / "nowhere"
    said = refused(change=lambda config: config["actor"].update(path=str(missing), model_config=None))
    assert said.startswith(f"actor.path: no model can be read from '{missing}'")
    node = {"_target_": "rft.data.encode.tokenizer.pretrained", "path": str(missing)}
    assert refused(change=put("actor.tokenizer", node)).startswith(f"actor.tokenizer.path={missing}: cannot load a tok")


@pytest.mark.parametrize(("role", "algorithm"), [("reference", "dpo"), ("critic", "ppo"), ("prm", "prime")])
def test_a_model_beside_the_policy_that_does_not_exist(role, algorithm, refused, tmp_path):
    missing = str(tmp_path / "nowhere")
    said = refused(f"algorithm={algorithm}", f"{role}.path={missing}", f"{role}.model_config=null")
    assert said.startswith(f"{role}.path: no model can be read from '{missing}'")
    said = refused(f"algorithm={algorithm}", f"{role}.path={missing}")
    assert said.startswith(f"{role}: set one of {role}.path")
    nobody_reads_it = refused(f"{role}.path={missing}", "steps=0")
    assert role not in nobody_reads_it


def test_cuda_graphs_where_an_engine_cannot_record_them(refused, monkeypatch):
    graphs = "rollout.engine.cuda_graphs=true"
    off = "set rollout.engine.cuda_graphs=false"
    assert refused(graphs, "strategy.device=cpu") == f"{graphs}: strategy.device=cpu has no CUDA graphs; {off}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(graphs, "strategy.device=auto") == f"{graphs}: torch finds no GPU; {off}"
    windows = ("actor.model_config.model_type=mistral", "+actor.model_config.sliding_window=8")
    said = refused(graphs, "strategy.device=auto", *windows)
    assert (
        f"{graphs}: a mistral has layers that do not attend to all tokens (sliding, linear or recurrent ones); {off}"
        in said
    )
    options = HFEngine.Options(max_rows=8, dtype=None, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"^rollout\.engine\.cuda_graphs=true: models that take media decode without"):
        options.check(engine_check_context(None, device="cuda", media=True))


def test_cuda_where_there_is_none(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused("strategy.device=cuda").startswith("strategy.device=cuda, but this torch sees no CUDA device")


@pytest.mark.parametrize("package", ["mlflow", "swanlab", "tensorboard", "trackio", "wandb"])
def test_a_logger_whose_package_is_not_installed(package, refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused(f"logger={package}")
    assert said == f"logger={package}: the package {package} is not installed; pip install 'rft[{package}]'"


def test_an_output_folder_that_cannot_be_made(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output_dir: the folder .* cannot be made"):
        Job(tiny(f"output_dir={tmp_path / 'file' / 'run'}")).fit("")


# Numbers that are not finite


@LOSSES.register("spoilt", reads=("advantages", "group", "version"))
def spoilt(logprobs, batch, *, part):
    """Not finite on the rows of every fourth group, in the loss or in its gradient alone, in the fourth step."""
    loss = -logprobs * batch["advantages"]
    wrong = (batch["version"] >= 3) & (batch["group"] % 4 == 1)[:, None]  # two steps of warm-up, one of training
    if part == "loss":
        return torch.where(wrong, float("nan"), loss), {}
    return loss + torch.where(
        wrong, logprobs - logprobs.detach(), 1.0
    ).sqrt(), {}  # the slope of a root is infinite at 0


@ADVANTAGES.register("spoilt")
def spoilt_advantage(scores, rewards, batch, *, row):
    advantages = batch["loss_mask"] * scores[:, None]
    advantages[row] = float("inf") if int(batch["version"].max()) >= 3 else 0.0
    return {"advantages": advantages}


@pytest.mark.parametrize(
    ("node", "options", "found"),
    [
        ("loss", {"part": "loss"}, "column 'loss/spoilt' in rows [4, 5, 6, 7]"),
        ("loss", {"part": "gradient"}, "column 'gradient of loss/spoilt' in rows [4, 5, 6, 7]"),
        ("advantage", {"row": 5}, "column 'advantages' in rows [5]"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run(node, options, found, tiny, tmp_path):
    config = tiny("checkpoint.every=1", "checkpoint.keep_last=9")
    config["algorithm"][node] = {"name": "spoilt", **options}
    with pytest.raises(ValueError) as caught:
        Job(config).fit("")
    run, said = tmp_path / "run", str(caught.value)
    assert said.startswith(
        "step 4: the loss or the gradient of the actor is not finite. Not finite on rank 0: " + found
    )
    saved = run / "diverged" / "step_00000004_actor_1_rank_0.safetensors"
    assert str(saved) in said
    assert len(load_file(saved)["tokens.input_ids"]) == 16
    assert len(json.loads(saved.with_suffix(".json").read_text())["fields"]) == 16
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == [f"step_{n:08d}" for n in (1, 2, 3)]
    assert not (run / "result.json").exists()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == [0, 1, 2, 3]


NUMBERS = {
    "actor.optimizer.lr": (("-1e-4", "nan", "inf", "1e30"), "0"),
    "actor.optimizer.eps": (("-1e-8", "2"), "0"),
    "actor.optimizer.weight_decay": (("-0.1", "nan", "1e3"), "0.1"),
    "actor.optimizer.betas": (("[0.9]", "[0.9, 1.0]", "[-0.1, 0.9]", "[0.9, 0.9, 0.9]"), "[0.8, 0.99]"),
    "actor.optimizer.final_lr": (("-0.1", "1.5"), "0.1"),
    "actor.optimizer.warmup_updates": (("-1", "1.5", "1000000000000"), "2"),
    "actor.optimizer.max_grad_norm": (("-1", "0", "nan"), "null"),
    "actor.micro_batch_tokens": (("0", "-64"), "64"),
    "actor.ema": (("0", "1", "nan"), "0.5"),
    "rollout.top_p": (("0", "1.5", "-0.1", "nan"), "0.9"),
    "rollout.top_k": (("-1", "0.5"), "5"),
    "rollout.min_p": (("-0.1", "2"), "0.1"),
    "rollout.temperature": (("0", "-1", "inf"), "0.5"),
    "rollout.max_new_tokens": (("0", "-3", "10000000000000"), "5"),
    "eval.temperature": (("0", "nan"), "0.5"),
    "eval.every": (("-5",), "0"),
    "checkpoint.every": (("-5",), "0"),
    "checkpoint.keep_last": (("0", "-1"), "1"),
    "checkpoint.keep_best": (("-1",), "0"),
    "faults.dead_after_s": (("0", "nan"), "5"),
    "faults.collective_timeout_s": (("0", "-1"), "90.5"),
    "strategy.replicas": (("-1", "0"), "1"),
    "steps": (("0", "-1", "1000000000000", "1.5"), "2"),
    "seed": (("-1", "1000000000000"), "3"),
    "batch.prompts": (("0", "-4"), "4"),
    "batch.epochs": (("0",), "2"),
    "trajectories.every": (("0",), "2"),
    "trajectories.rows": (("-1",), "0"),
    "data.train.count": (("-1", "0", "1000000000000"), "64"),
    "data.train.length": (("[0, 3]", "[5, 4]", "[4]"), "[3, 4]"),
    "data.train.slips": (("-0.1", "1.1"), "0.5"),
    "data.max_prompt_tokens": (("0",), "20"),
    "plan.memory_gib": (("0", "-8", "nan"), "80"),
    "algorithm.group_size": (("0", "-1"), "4"),
    "algorithm.loss.clip_high": (("-0.2", "nan"), "inf"),
    "warmup.optimizer.lr": (("-1",), "0.001"),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_out_of_their_range_are_refused_by_key(key, refused):
    for wrong in NUMBERS[key][0]:
        said = refused(f"{key}={wrong}")
        assert key in said.splitlines()[0], (wrong, said)


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_in_their_range_are_accepted(key, resolved):
    Job(resolved(f"{key}={NUMBERS[key][1]}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.stop=['']", "rollout.stop=['']: an empty string ends every text"),
        ("name=../x", "name='../x': a run folder has this name"),
        ("output_dir=''", "output_dir='': name a folder"),
        ("plugins=-1", "plugins: expected list[str], got -1"),
        ("plugins=['']", "plugins: no module '' is found"),
        ("++actor.model_config.hidden_act=nosuch", "actor.model_config: transformers cannot build the model"),
    ],
)
def test_texts_and_lists_that_cannot_be_used(override, message, refused):
    assert refused(override).startswith(message)
