"""`mode=replay`: a step is taken again exactly, and another algorithm has the same rows and weights."""

import json
from io import StringIO

import pytest
from rich.console import Console

from rft.modes.replay.run import replay
from rft.setup.assembly import Job
from tests.helpers import ADAPTIVE, CLOCK

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", "actor.optimizer.lr=0.005")
LORA = ("actor/lora=lora", "actor.lora.rank=4", "algorithm/terms=[kl]", "algorithm.iteration=2")
slow = pytest.mark.slow
RUNS = {  # overrides of the run, the step, and how many steps before it are taken again
    "grpo from a checkpoint one step back": (("batch.minibatches=2", "batch.epochs=2"), 4, 1),
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
    assert facts["unequal"] == {} and facts["equal"] == len(compared) > 5 and row["grad_norm"] > 0
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
