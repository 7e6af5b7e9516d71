"""The comparison of two checkouts: a recording of a real run, and what a comparison notices."""

import copy
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import compare_runs  # noqa: E402
from comparison.recording import Recorder, digest, read_file, read_tensors  # noqa: E402
from comparison.runs import RUNS, Run, chosen  # noqa: E402
from comparison.verdicts import compare, table  # noqa: E402

WEIGHT = "actor/model.safetensors:w"


@pytest.fixture
def recording(tmp_path):
    """Makes a recording of one run with a number, a file and a tensor; returns it with the folder of the tensor."""

    def make(name="a", ranks=1, loss=0.1, metric="loss", weight=0.5, tensor=WEIGHT, contents="same"):
        tensors = {tensor: torch.tensor([1.0, weight])}
        folder = tmp_path / f"{name}.tensors"
        folder.mkdir()
        save_file(tensors, folder / "tiny.safetensors")
        run = {
            "ranks": ranks,
            "steps": {"0": {"step": 0}, "1": {"step": 1, metric: loss}},
            "tensors": {key: digest(value) for key, value in tensors.items()},
            "files": {} if ranks > 1 else {"answers.jsonl": {"sha256": contents, "numbers": [1.0]}},
        }
        return {"checkout": "here", "commit": "c", "torch": "2", "runs": {"tiny": run}}, folder

    return make


@pytest.fixture
def compared(monkeypatch, capsys):
    """Runs the command on two recordings; returns its status and what it prints."""

    def run(*recordings):
        files = [folder.with_suffix(".json") for _, folder in recordings]
        for file, (found, _) in zip(files, recordings, strict=True):
            file.write_text(json.dumps(found))
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", "compare", *map(str, files)])
        try:
            compare_runs.main()
            status = 0
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().out

    return run


def verdict(one, other):
    (found,) = compare(one[0], other[0], (one[1], other[1]))
    return found


def test_what_is_equal_passes(recording):
    found = verdict(recording("a"), recording("b"))
    assert (found.problems, found.largest, found.steps, found.numbers, found.tensors) == ([], 0.0, 2, 4, 1)
    assert "| tiny | 1 | 2 | 4 | 1 | 0 | bit-equal |" in table([found])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss": math.nextafter(0.1, 1.0)}, "loss of step 1: 0.1, and 0.10000000000000002"),
        ({"loss": math.nan}, "loss of step 1: 0.1, and nan"),
        ({"metric": "loss/new"}, "only the first recording has the metric loss"),
        ({"weight": 0.5 + 2**-24}, f"{WEIGHT}: the values differ"),
        ({"tensor": "other", "weight": 2.0}, f"only the first recording has the tensor {WEIGHT}"),
        ({"contents": "other"}, "answers.jsonl: the contents differ"),
    ],
)
def test_one_process_has_to_be_equal_to_the_last_bit(changes, complaint, recording):
    found = verdict(recording("a"), recording("b", **changes))
    assert complaint in found.problems
    assert "FAILED" in table([found]) and complaint in table([found])


@pytest.mark.parametrize("where", ["loss", "weight"])
@pytest.mark.parametrize(("difference", "passes"), [(5e-7, True), (2e-6, False)])
def test_two_ranks_may_differ_a_little(where, difference, passes, recording):
    one, other = recording("a", 2, **{where: 0.25}), recording("b", 2, **{where: 0.25 + difference})
    found = verdict(one, other)
    assert found.largest == pytest.approx(difference, rel=0.1)
    assert (found.problems == []) is passes
    assert ("within 1e-06" in table([found])) is passes


def test_a_tensor_may_have_another_name(recording):
    found = verdict(recording("a"), recording("b", tensor="actor/renamed"))
    assert (found.problems, found.tensors) == ([], 1)


def test_a_run_that_one_recording_lacks_fails(recording):
    one, other = recording("a"), recording("b")
    other[0]["runs"]["more"] = copy.deepcopy(other[0]["runs"]["tiny"])
    found = compare(one[0], other[0], (one[1], other[1]))
    assert [each.problems for each in found] == [[], ["only the second recording has the run"]]


def test_runs_come_behind_those_that_they_need():
    assert [run.name for run in chosen(["evaluate", "gkd"])] == ["default", "evaluate", "sft_packed", "gkd"]
    assert chosen() == list(RUNS)
    with pytest.raises(ValueError, match="--only gkkd: no such run"):
        chosen(["gkkd"])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_commands_compose(run, resolved, tmp_path):
    command = Recorder(ROOT, tmp_path, tmp_path, "new").command(run)
    config = resolved(*command[command.index("rft.main") + 1 :])
    assert config["output_dir"] == str(tmp_path / run.name / "run")


def test_the_clock_and_the_folder_do_not_count(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    told = {"time/step_s": 1.0, "loss": 2.0, "model": str(tmp_path / "one" / "run")}
    (tmp_path / "one" / "result.json").write_text(json.dumps(told))
    told = {"model": str(tmp_path / "other" / "run"), "loss": 2.0, "time/step_s": 3.0}
    (tmp_path / "other" / "result.json").write_text(json.dumps(told))
    one, other = (read_file(tmp_path / side / "result.json", str(tmp_path / side)) for side in ("one", "other"))
    assert one == other and one["numbers"] == [2.0]


def test_the_tensors_of_every_file_of_a_checkpoint_are_read(tmp_path):
    (tmp_path / "actor").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "actor" / "model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "shard.safetensors")
    found = {name: tensor.tolist() for name, tensor in read_tensors(tmp_path).items()}
    assert found == {WEIGHT: [1.0], "shard.safetensors:w": [0.0, 0.0]}


@pytest.mark.slow
def test_a_real_run_is_recorded(tmp_path, compared):
    small = ("algorithm=sft", "cache=null", "strategy.device=cpu", "data.train.count=8", "data.eval.heldout.count=2")
    tiny = Run("tiny", (*small, "steps=1", "batch.prompts=2", "seed=3"))
    folder = tmp_path / "one.tensors"
    found = Recorder(ROOT, tmp_path / "runs", folder).record_all([tiny], 1, lambda text: None)
    assert found["failed"] == []
    run = found["runs"]["tiny"]
    assert run["steps"]["1"]["loss/nll"] > 0 and "seed=3" in run["command"]
    assert not [name for name in run["steps"]["1"] if name.startswith(("time/", "memory/", "throughput/"))]
    assert any(name.startswith("actor/model.safetensors:") for name in run["tensors"])
    assert any("optimizer" in name for name in run["tensors"])
    status, said = compared((found, folder), (found, shutil.copytree(folder, tmp_path / "other.tensors")))
    assert status == 0 and "| tiny | 1 | 2 |" in said and "bit-equal" in said
    changed = copy.deepcopy(found)
    changed["runs"]["tiny"]["steps"]["1"]["loss/nll"] += 1e-15
    status, said = compared((found, folder), (changed, tmp_path / "other.tensors"))
    assert status == 1 and "FAILED" in said


def test_the_status_of_the_command_is_whether_there_is_a_difference(recording, compared):
    one = recording("one")
    status, said = compared(one, recording("other"))
    assert status == 0 and "| tiny | 1 | 2 |" in said and "bit-equal" in said
    status, said = compared(one, recording("more", loss=0.1 + 1e-15))
    assert status == 1 and "FAILED" in said
