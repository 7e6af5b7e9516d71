"""A reward model from pairs to reward: trained, exported, loaded by transformers, and asked by a run that samples."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rft.distributed import stop
from rft.modes.evaluate import evaluate
from rft.modes.plan.job import PlanJob
from rft.modes.plan.report import plan
from rft.registry import Target
from rft.setup.assembly import Job
from tests.helpers import CLOCK, identical
from tests.reward.models.test_scalar import save

ON_RANKS = {
    "pairs": ("algorithm=reward_model", "algorithm/terms=[score_centering]"),
    "steps": ("algorithm=process_reward_model",),
}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_plan_goes_through_it(resolved, tmp_path):
    small = ("batch.prompts=4", "steps=1", "rollout.max_new_tokens=5", "data.train.count=64")
    stop()
    forecast = PlanJob(resolved("algorithm=reward_model", "plan.prompt_tokens=6", *small), 1).forecast()
    assert forecast.memory["update"]["activations"] > 0
    assert "rollout" not in forecast.memory and "evaluate" not in forecast.memory
    model = ("reward/terms=[exact_match,model]", f"reward.terms.model.path={tmp_path}", "warmup=none")
    asked = PlanJob(resolved("algorithm=grpo", "plan.prompt_tokens=6", *small, *model), 1).forecast()
    assert asked.memory["update"]["activations"] > 0, "without the model, which is not there"


@pytest.mark.parametrize(
    ("offload", "said"),
    [("disk", "that of the largest"), pytest.param("null", "that of all in every stage", marks=pytest.mark.slow)],
)
def test_a_plan_says_that_it_does_not_count_the_memory_of_reward_models(offload, said, resolved, tmp_path):
    model = ("reward/terms=[exact_match,model]", f"reward.terms.model.path={tmp_path}", f"reward.offload={offload}")
    small = ("plan.prompt_tokens=6", "batch.prompts=4", "steps=1", "rollout.max_new_tokens=5", "warmup=none")
    stop()
    plan(resolved(*small, *model), 1, [], Console(width=300, file=(out := io.StringIO())))
    assert f"their memory is not counted here: {said}" in out.getvalue()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("algorithm=reward_model", "rollout=hf"),
            "actor.head=score: a model with this head cannot generate text; choose rollout=none",
        ),
        (("rollout=none",), "rollout=none: no engine samples the texts that train; choose rollout=hf"),
        (
            ("algorithm=reward_model", "actor.head=lm"),
            "algorithm.loss: 'bradley_terry' trains the head 'score', but actor.head=lm",
        ),
        (
            ("algorithm=reward_model", "warmup=supervised"),
            "warmup.loss: 'nll' trains the head 'lm', but actor.head=score",
        ),
        (
            ("algorithm=reward_model", "algorithm/terms=[entropy]"),
            "algorithm.terms: 'entropy' trains the head 'lm', but 'bradley_terry'",
        ),
        (
            ("algorithm=reward_model", "actor/lora=lora"),
            "actor.lora: adapters do not train the head of actor.head=score",
        ),
        (
            ("algorithm=reward_model", "strategy.context_parallel=2"),
            "strategy.context_parallel=2: with actor.head=score",
        ),
        (
            ("algorithm=reward_model", "metric=eval/heldout/model"),
            "metric=eval/heldout/model: the run has no such metric",
        ),
        (
            ("algorithm=reward_model", "algorithm/source=dataset"),
            "algorithm.loss reads the column 'chosen', which nothing",
        ),
        (
            ("algorithm=reward_model", "algorithm.loss.margin=true"),
            "algorithm.loss reads the column 'margin', which nothi",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(overrides, said, resolved):
    with pytest.raises(ValueError) as caught:
        Job(resolved(*overrides))
    assert said in str(caught.value)


def test_a_reward_model_that_is_not_there_is_refused_before_any_model_is_loaded(tiny, tmp_path):
    wrong = ("reward/terms=[exact_match,format,model]", f"reward.terms.model.path={tmp_path / 'nothing'}")
    with pytest.raises(ValueError, match=r"reward\.terms\.model\.path: no model can be read from"):
        Job(tiny(*wrong)).fit("")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(resolved, tmp_path_factory):
    """The folder of a run on the built-in pairs."""
    folder = tmp_path_factory.mktemp("trained")
    small = ("steps=60", "actor.optimizer.lr=1e-3", "eval.every=0", "data.eval.heldout.count=128")
    Job(resolved("algorithm=reward_model", *small, f"output_dir={folder / 'run'}")).fit("")
    return folder / "run"


@pytest.mark.slow
def test_it_learns_to_tell_right_from_wrong_and_says_so(trained):
    first, last = lines(trained)[0], lines(trained)[-1]
    assert first["eval/heldout/accuracy"] < 0.7 and last["eval/heldout/accuracy"] > 0.9
    assert last["eval/heldout/margin"] > 1.0
    assert last["preference/margin"] == pytest.approx(
        last["preference/score_chosen"] - last["preference/score_rejected"]
    )
    assert json.loads((trained / "result.json").read_text())["eval/heldout/accuracy"] > 0.9


@pytest.mark.slow
def test_transformers_gives_the_scores_that_the_run_told(trained):
    told = [json.loads(line) for line in (trained / "trajectories/step_00000060.jsonl").read_text().splitlines()]
    folder = trained / "checkpoints/latest/actor"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [row["prompt"] + row["response"] for row in told]  # the exported tokenizer appends the end token
    with torch.no_grad():
        found = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    torch.testing.assert_close(found, torch.tensor([row["score"] for row in told]), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_is_a_term_of_the_reward_of_another_run(trained, tiny, tmp_path):
    path = trained / "checkpoints/latest/actor"
    Job(tiny("reward/terms=[exact_match,format,model]", f"reward.terms.model.path={path}", "steps=2")).fit("")
    last = lines(tmp_path / "run")[-1]
    terms = {name: last[f"reward/{name}"] for name in ("exact_match", "format", "model")}
    assert last["reward/mean"] == pytest.approx(sum(terms.values()), abs=1e-5)
    assert abs(terms["model"]) > 0.1 and "eval/heldout/model" in last


@pytest.mark.slow
def test_a_model_normalizes_by_the_moments_of_its_held_out_pairs_also_after_a_resume(resolved, sized, tmp_path):
    small = ("batch.minibatches=1", "eval.every=2", "checkpoint.every=1", "checkpoint.keep_last=9", "steps=3")

    def config(name):
        return resolved(*sized("algorithm=reward_model", *small, f"output_dir={tmp_path / name}"))

    def moments(name, step):
        saved = json.loads((tmp_path / name / f"checkpoints/step_{step:08d}/actor/config.json").read_text())
        return {key: saved[key] for key in ("mean", "std") if key in saved}

    Job(config("whole")).fit("")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    checkpoints = tmp_path / "parts" / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000003")
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to("step_00000002")
    (tmp_path / "parts" / "result.json").unlink()
    Job(config("parts")).fit("")
    for name in ("whole", "parts"):
        assert moments(name, 1) == {}, "no evaluation has measured these weights"
        assert moments(name, 2) != moments(name, 3) == moments("whole", 3)

    node = resolved("reward/terms=[model]", "reward.accuracy=model", "reward.terms.model.path=x")["reward"]
    node["terms"]["model"] |= {"path": str(tmp_path / "parts/checkpoints/latest/actor"), "normalize": True}
    reward = Target(node, "reward").build()
    reward.check()
    (rows,) = Job(config("parts")).load_held_out().values()
    pairs = [(row[field], row) for row in rows for field in ("chosen", "rejected")]
    scores = reward.score([text for text, _ in pairs], [row for _, row in pairs]).terms["model"].double()
    assert abs(scores.mean()) < 1e-5 and abs(scores.std() - 1) < 1e-5

    again = (*small, "steps=2", f"actor.path={tmp_path / 'parts/checkpoints/latest/actor'}", "actor.model_config=null")
    Job(resolved(*sized("algorithm=reward_model", *again, f"output_dir={tmp_path / 'again'}"))).fit("")
    assert moments("again", 1) == {}, "those of the model it began with are not its own"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Overrides for a reward of a scalar and a process reward model and a judge, which know nothing."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind, changes in (
        ("model", AutoModelForSequenceClassification, {}),
        ("process_model", AutoModelForTokenClassification, {"num_labels": 2}),
        ("judge", AutoModelForCausalLM, {}),
    ):
        save(folder / name, kind, **changes)
    paths = [f"reward.terms.{name}.path={folder / name}" for name in ("model", "process_model", "judge")]
    question = ("data/question@reward.terms.judge.question=short_good", "reward.terms.process_model.separator=+")
    return ("reward/terms=[exact_match,format,model,process_model,judge]", *paths, *question)


@pytest.mark.slow
def test_a_run_with_offloaded_models_trains_the_same_weights(models, tiny, tmp_path):
    found = []
    for offload in ("null", "disk"):
        folder = tmp_path / offload
        Job(
            tiny(*models, "warmup=none", "steps=1", "eval.every=1", f"reward.offload={offload}", f"output_dir={folder}")
        ).fit("")
        numbers = [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines(folder)]
        found.append((numbers, load_file(folder / "checkpoints/latest/actor/model.safetensors")))
    assert identical(*found)
    assert {"reward/judge", "eval/heldout/process_model"} <= set(found[0][0][-1])


def test_models_are_not_offloaded_to_where_they_compute(models, tiny):
    with pytest.raises(ValueError, match=r"reward\.offload=cpu: the run computes on this device"):
        Job(tiny(*models, "reward.offload=cpu")).fit("")
    with pytest.raises(ValueError, match=r"reward\.offload=cpu: the run computes on this device"):
        evaluate(tiny(*models, "reward.offload=cpu", "mode=evaluate"), Console(quiet=True))


@pytest.mark.slow
def test_two_ranks_that_share_reward_models_train_what_one_with_whole_models_trains(models, tiny, torchrun, tmp_path):
    """With an odd number of held-out rows, and with rounds of dynamic sampling."""
    redrawn = ("algorithm/source=dynamic_sampling", "algorithm.source.redraw.term=exact_match")
    both = (*models, *redrawn, "steps=2", "eval.every=1", "data.eval.heldout.count=7", "reward.terms.model.weight=0.1")
    Job(tiny(*both, f"output_dir={tmp_path / 'whole'}")).fit("")
    file = tmp_path / "configs.json"
    file.write_text(json.dumps([tiny(*both, "reward.shard=true", f"output_dir={tmp_path / 'sharded'}")]))
    torchrun(Path(__file__).parent / "runs_on_ranks.py", file)
    compared = set()
    for alone, together in zip(lines(tmp_path / "whole"), lines(tmp_path / "sharded"), strict=True):
        shared = {key for key in alone if key.startswith(("reward/", "eval/", "loss/", "grad_norm", "score/"))}
        for key in shared & together.keys():
            assert together[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-5), key
        compared |= shared & together.keys()
    assert {f"reward/{name}" for name in ("model", "process_model", "judge")} <= compared
    assert {"eval/heldout/model", "eval/heldout/judge"} <= compared


@pytest.mark.slow
def test_two_processes_train_what_one_trains(resolved, sized, torchrun, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    both = ("batch.minibatches=2", "actor.packing=false")

    def config(name, ranks):
        return resolved(*sized(*ON_RANKS[name], *both, f"output_dir={tmp_path / name / ranks}"))

    for name in ON_RANKS:
        Job(config(name, "one")).fit("")
    file = tmp_path / "configs.json"
    file.write_text(json.dumps([config(name, "two") for name in ON_RANKS]))
    torchrun(Path(__file__).parent / "runs_on_ranks.py", file)
    torch.set_num_threads(threads)
    compared = set()
    for name in ON_RANKS:
        for alone, together in zip(*(lines(tmp_path / name / ranks) for ranks in ("one", "two")), strict=True):
            shared = {key for key in alone if key.startswith(("loss/", "preference/", "steps/", "eval/", "grad_norm"))}
            for key in shared & together.keys():
                assert together[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-5), key
            compared |= shared & together.keys()
    assert {"loss/bradley_terry", "loss/score_centering", "preference/accuracy", "eval/heldout/margin"} <= compared
    assert {"loss/step_cross_entropy", "steps/accuracy", "eval/heldout/first_error"} <= compared
