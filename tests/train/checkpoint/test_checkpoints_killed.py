"""A process that is killed at any write of a checkpoint leaves one that is whole: the new one, or the one before."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from rft.train.checkpoint.manifest import damage
from tests.conftest import ENDS_S

WRITER = Path(__file__).parent / "killed_writer.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each kill left, by the number of the file operation before which the process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(WRITER), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, env=environment)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "outcomes.json").read_text())


@pytest.mark.slow
def test_after_a_kill_at_any_write_a_whole_checkpoint_is_read(outcomes):
    _, found = outcomes
    read = [outcome["step"] for outcome in found]
    assert len(found) > 25 and found[-1]["killed"] is False
    assert all(outcome["killed"] for outcome in found[:-1])
    assert set(read) == {2, 3} and read == sorted(read), "the one before, and from one moment on the new one"
    assert all(outcome["values"] == [float(outcome["step"])] * 3 for outcome in found)
    assert all(outcome["warnings"] == [] for outcome in found), "no checkpoint that has its name is damaged"


@pytest.mark.slow
def test_what_a_kill_leaves_is_cleared(outcomes):
    folder, found = outcomes
    for number, outcome in enumerate(found):
        checkpoints = folder / str(number) / "checkpoints"
        names = sorted(os.listdir(checkpoints))
        assert names == ["latest", *(f"step_{step:08d}" for step in outcome["kept"])]
        assert len(outcome["kept"]) <= 2
        assert (checkpoints / "latest").resolve().name == f"step_{outcome['step']:08d}"
        assert damage((checkpoints / "latest").resolve()) is None
        shutil.rmtree(folder / str(number))
