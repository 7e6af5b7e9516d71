"""A run that changes its number of ranks from two to one and back uses every position of the data once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from rft.setup.assembly import Job
from rft.train.ledger import AGAIN, TRAINED, WAITING
from tests.conftest import ENDS_S
from tests.helpers import close, numbers
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")
# Dynamic sampling drops groups, and keeps groups for the next step.
RUN = ("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "seed=1", "warmup=none", "eval.every=0",
       "strategy.device=cpu")  # fmt: skip


@pytest.fixture
def on_two_ranks(sized, tmp_path):
    """Runs the command on two ranks."""

    def run(*overrides):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "rft.main", *sized(f"output_dir={tmp_path}/run", *RUN, *overrides)]
        environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=ENDS_S)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def positions(ledger):
    """The positions of each outcome."""
    return {
        outcome: [position for first, last in spans for position in range(first, last + 1)]
        for outcome, spans in ledger.items()
    }


@pytest.mark.slow
def test_two_one_and_two_ranks_use_every_position_once(on_two_ranks, tiny, tmp_path, capsys):
    run, waiting = tmp_path / "run", []
    on_two_ranks("steps=2")
    waiting.append(state(run)["ledger"]["train"].get(WAITING, []))
    Job(tiny(*RUN, "steps=3")).fit("")
    assert "ranks: 2 then, 1 now)" in " ".join(capsys.readouterr().out.split())
    waiting.append(state(run)["ledger"]["train"].get(WAITING, []))
    on_two_ranks("steps=5")
    alone = tiny(*RUN, "steps=5")
    alone["output_dir"] = str(tmp_path / "alone")
    Job(alone).fit("")

    parts, whole = state(run), state(tmp_path / "alone")
    assert all(waiting), "groups waited at both changes"
    assert parts["ledger"] == whole["ledger"]
    found = positions(parts["ledger"]["train"])
    assert AGAIN not in found and len(found["no signal"]) > 0
    drawn = whole["source"]["position"]
    assert sorted(position for used in found.values() for position in used) == list(range(drawn))
    assert len(found[TRAINED]) == 5 * 4, "steps times prompts"
    assert parts["source"]["position"] == drawn
    assert not (run / "warnings.txt").exists(), "groups that waited are of older weights, which is no gap"

    rows, expected = numbers(run), numbers(tmp_path / "alone")
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [0, 1, 2, 3, 4, 5]
    for name in ("reward/mean", "length/mean", "rollout/rounds", "grad_norm", "entropy", "loss/ppo_clip"):
        assert [row[name] for row in rows[1:]] == pytest.approx([row[name] for row in expected[1:]], rel=1e-4), name
    close(parts["actors"]["actor"]["network"], whole["actors"]["actor"]["network"], 1e-4)
