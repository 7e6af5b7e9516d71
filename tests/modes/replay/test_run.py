"""`mode=replay`: a step is taken again exactly, and another algorithm has the same rows and weights."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from rft.modes.replay.run import replay
from rft.setup.assembly import Job
from tests.helpers import ADAPTIVE, CLOCK

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", "actor.optimizer.lr=0.005")
LORA = ("actor/lora=lora", "actor.lora.rank=4", "algorithm/terms=[kl]", "algorithm.iteration=2")
slow = pytest.mark.slow
RUNS = {  # overrides of the run, the step, and how many steps before it are taken again
    "several updates a step": pytest.param(("batch.minibatches=2", "batch.epochs=2"), 4, 1, marks=slow),
    "the first step of training": pytest.param((), 3, 0, marks=slow),
    "from the beginning": pytest.param(("warmup=none", "checkpoint.every=0"), 3, 2, marks=slow),
    "the first step of all": pytest.param(("warmup=none", "checkpoint.every=0"), 1, 0, marks=slow),
    "through a warm-up that an evaluation ends": pytest.param(
        ("checkpoint.every=0", "checkpoint.keep_last=1", "warmup.stop_at=0.0", "warmup.eval_every=1"), 3, 2, marks=slow
    ),
    "ppo with critic and reference": pytest.param(
        ("algorithm=ppo", "algorithm/terms=[kl,entropy]", "batch.minibatches=2"), 6, 1, marks=slow
    ),
    "adaptive coefficients": pytest.param(ADAPTIVE, 6, 1, marks=slow),
    "running moments of scores": pytest.param(("algorithm=rloo", "algorithm/shaping=[running_norm]"), 6, 1, marks=slow),
    "groups that wait": pytest.param(
        ("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "seed=1"), 6, 1, marks=slow
    ),
    "adapters with their reference": pytest.param(LORA, 6, 1, marks=slow),
    "supervised": pytest.param(("algorithm=sft",), 4, 1, marks=slow),
    "a reference that is precomputed": pytest.param(
        ("algorithm=dpo", "reference.precompute=true", "warmup=none"), 4, 1, marks=slow
    ),
    "process rewards": pytest.param(("algorithm=prime",), 6, 1, marks=slow),
}


@pytest.fixture
def replayed(tiny, tmp_path):
    """What a replay returns, `step.json`, the lines of `tokens.jsonl`, and what is printed, in one line."""

    def run(step, *overrides):
        console = Console(file=StringIO(), width=200)
        found = replay(tiny("mode=replay", f"replay.step={step}", *overrides), console)
        folder = tmp_path / "run" / "replay" / f"step_{step}"
        tokens = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
        return found, json.loads((folder / "step.json").read_text()), tokens, " ".join(console.file.getvalue().split())

    return run


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("overrides", "step", "retaken"), RUNS.values(), ids=RUNS.keys())
def test_the_algorithm_of_the_run_gives_the_numbers_that_it_logged(overrides, step, retaken, tiny, tmp_path, replayed):
    """Exactly; and a second time, as the algorithm of the command. The run folder stays as it is."""
    given = (*RUN, *overrides)
    Job(tiny(*given)).fit("")
    before = files(tmp_path / "run")
    found, facts, tokens, text = replayed(step, *given)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if row["step"] == step]
    compared = [n for n in row if not n.startswith((*CLOCK, "eval/", "engine/")) and n not in ("step", "stage")]
    assert facts["unequal"] == {} and facts["compared"] == len(compared) > 5 and row["grad_norm"] > 0
    assert f"gives all {len(compared)} numbers again" in text and "no key of algorithm differs" in text
    assert (found, facts["numbers"], facts["changes"], tokens) == (0.0, {}, {}, [])
    assert facts["retaken"] == retaken
    for update in facts["updates"]:
        assert update["tokens"] > 0 and update["differ"] == 0
        assert update["cosine"] is None or update["cosine"] == pytest.approx(1, abs=1e-12)
    after = files(tmp_path / "run")
    assert {path: after[path] for path in before} == before
    assert {path.relative_to(tmp_path / "run").parts[0] for path in after.keys() - before.keys()} == {"replay"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "no temporary file stays"


@pytest.fixture
def trained(tiny):
    """Trains a run, with several updates a step so that ratios leave 1; returns its overrides."""

    def train(*overrides):
        given = (*RUN, "warmup=none", "batch.minibatches=2", "batch.epochs=2", *overrides)
        Job(tiny(*given)).fit("")
        return given

    return train


def test_another_loss_has_the_numbers_of_a_run_with_that_loss(trained, replayed, tiny, tmp_path):
    """A run with GSPO that starts from the checkpoint before the step samples the same rows and logs the same."""
    given, other = trained("checkpoint.every=1"), ("algorithm/loss=gspo", "algorithm.loss.clip_high=0.01")
    found, facts, tokens, text = replayed(4, *given, *other)
    config = tiny(*given, *other, f"resume={tmp_path / 'run' / 'checkpoints' / 'step_00000003'}")
    Job(config | {"output_dir": str(tmp_path / "gspo")}).fit("")
    row = json.loads((tmp_path / "gspo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 4 and facts["unequal"] == {}
    command = {name: pair[1] for name, pair in facts["numbers"].items()}
    assert {"loss/gspo", "loss/ppo_clip", "grad_norm", "clip/high"} <= command.keys()
    assert command.pop("loss/ppo_clip") is None
    assert command == {name: row[name] for name in command}
    assert "changed: algorithm.loss.name (ppo_clip there, gspo here)" in text
    first, second, *_ = facts["updates"]
    assert first["grad_norm"][0] == pytest.approx(first["grad_norm"][1]), "ratios are 1"
    assert second["differ"] > 0 and second["cosine"] < 0.999
    assert found == max(abs(token["run"] - token["command"]) for token in tokens) > 0
    assert len(tokens) == sum(update["differ"] for update in facts["updates"])
    columns = load_file(tmp_path / "run" / "replay" / "step_4" / "tokens.safetensors")
    assert columns["trained"].sum((1, 2)).tolist() == [update["tokens"] for update in facts["updates"]]
    for token in tokens:
        place = token["update"] - 1, token["row"], token["position"]
        for name in ("run", "command", "ratio"):
            assert float(columns[name][place]) == pytest.approx(token[name])
        assert columns["trained"][place]
    assert columns["input_ids"].shape == columns["run"].shape[1:]


@pytest.mark.slow
def test_a_narrower_clip_takes_the_gradient_of_the_tokens_that_it_clips(trained, replayed):
    """In the first update that differs, both have the same weights."""
    given, clip = trained(), 0.01
    _, facts, tokens, _ = replayed(4, *given, f"algorithm.loss.clip_low={clip}", f"algorithm.loss.clip_high={clip}")
    number = next(number for number, update in enumerate(facts["updates"], 1) if update["differ"])
    update, tokens = facts["updates"][number - 1], [token for token in tokens if token["update"] == number]
    assert number > 1 and update["differ"] == update["lost"] == len(tokens) > 0
    assert update["gained"] == update["turned"] == 0
    for token in tokens:
        beyond = token["ratio"] > 1 + clip if token["run"] < 0 else token["ratio"] < 1 - clip
        assert beyond and token["command"] == 0 and token["run"] != 0


REFUSED = {
    "batch.minibatches=1": "only keys of algorithm may differ from .*batch.minibatches .2 there, 1 here.*Add: batch.mi",
    "actor.optimizer.lr=0.01": "actor.optimizer.lr .0.005 there, 0.01 here",
    "data.train.count=65": "data.train.count .64 there, 65 here",
    "algorithm.group_size=2": "algorithm.group_size .4 there, 2 here. may not differ from the run: the rows are",
    "algorithm/source=dynamic_sampling": "algorithm.source.redraw.* may not differ from the run: it makes the rows",
    "algorithm.critic_warmup=1": "algorithm.critic_warmup",
    "algorithm/terms=[kl]": "reads ref_logprobs of the reference, a model that the run does not have",
    "algorithm/advantage=remax": "reads greedy_scores, which the run has not sampled",
    "replay.step=9": "replay.step=9 is no step of the stage train of .*run; it has logged the steps 1 to 4",
    "replay.step=null": "set replay.step to the number of a step",
    "output_dir=nowhere": "output_dir=nowhere holds no run with a config.yaml; set output_dir to the folder of a run",
    "algorithm.loss.clip_low=-1": "algorithm.loss.clip_low=-1",
}


@pytest.mark.slow
def test_what_is_refused(trained, replayed):
    given = trained()
    for override, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            replayed(4, *given, override)


@pytest.mark.slow
def test_a_step_in_which_the_critic_alone_trains(tiny, replayed):
    given = (*RUN, "warmup=none", "algorithm=vapo", "algorithm.critic_warmup=2", "batch.minibatches=2")
    Job(tiny(*given)).fit("")
    found, facts, tokens, text = replayed(2, *given, "algorithm.critic_loss.clip=0.0001")
    assert (found, facts["updates"], tokens, facts["unequal"]) == (0.0, [], [], {})
    assert "critic/grad_norm" in facts["numbers"] and "the policy does not train in this step" in text


@pytest.mark.slow
def test_a_step_of_the_warm_up_is_refused(tiny, replayed):
    Job(tiny(*RUN)).fit("")
    with pytest.raises(ValueError, match=r"replay.step=2 is a step of the warm-up.*choose one from 3 to 6"):
        replayed(2, *RUN)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [(), ("strategy.tensor_parallel=2",)], ids=["sharded", "tensor parallel"])
def test_two_ranks_find_what_one_finds(shared, trained, replayed, tiny, torchrun, tmp_path):
    """Up to rounding: the two sum in another order, and the run was taken on one."""
    given, other = trained(), ("algorithm/loss=gspo", "algorithm.loss.clip_high=0.01")
    _, alone, tokens, _ = replayed(4, *given, *other)
    both, folder = tiny("mode=replay", "replay.step=4", *given, *other, *shared), tmp_path / "both"
    both["replay"]["output"], file = str(folder), tmp_path / "config.json"
    file.write_text(json.dumps([both]))
    torchrun(Path(__file__).parent.parent / "modes_on_ranks.py", file, tmp_path / "printed")
    facts = json.loads((folder / "step.json").read_text())
    for one, two in zip(alone["updates"], facts["updates"], strict=True):
        for name in ("tokens", "differ", "lost", "gained", "turned"):
            assert one[name] == two[name]
        for name in ("loss", "grad_norm", "cosine"):
            assert one[name] == (two[name] and pytest.approx(two[name], rel=1e-5, abs=1e-6))
    lines = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    found = {(token["update"], token["row"], token["position"]): token for token in lines}
    for token in tokens:
        again = found[token["update"], token["row"], token["position"]]
        assert again["text"] == token["text"]
        assert (again["run"], again["command"]) == pytest.approx((token["run"], token["command"]), rel=1e-3, abs=1e-7)
