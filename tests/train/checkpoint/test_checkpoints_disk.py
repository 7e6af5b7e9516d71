"""The order in which a checkpoint gets onto the disk, and how long the next one waits for it."""

import threading

import pytest

from rft.distributed import start
from rft.train.checkpoint import checkpoints as module
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.checkpoint.options import CheckpointOptions


@pytest.fixture
def saved(tmp_path):
    """The checkpoints of a new run."""
    run = tmp_path / "run"
    run.mkdir()
    options = CheckpointOptions(every=1, keep_last=2, keep_best=0, keep_every=0, export_every=1, export_dtype="auto")
    return Checkpoints(run, options, start("cpu"), "accuracy", pytest.fail)


def save_model(folder, _=None):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_a_power_cut_at_any_time_leaves_a_checkpoint_whole_or_without_its_name(saved, disk_calls):
    """Before a name changes, all that it leads to is on the disk, and after it the folder with the name."""
    disk_calls.clear()
    saved.write(1, {"step": 1}, save_model, None, False)
    assert saved.wait()
    run = saved.run
    folder, partial = run / "checkpoints", run / "checkpoints" / ".step_00000001.partial"
    named, linked = (disk_calls.index(("rename", str(folder / name))) for name in ("step_00000001", "latest"))
    synced = {path: at for at, (call, path) in enumerate(disk_calls[:named]) if call == "sync"}
    files = [path for path in (folder / "step_00000001").rglob("*") if path.is_file()]
    assert len(files) == 4
    for path in files:
        own = partial / path.relative_to(folder / "step_00000001")
        assert synced[str(own)] < synced[str(own.parent)], "first the file, then its name"
    assert (
        synced[str(partial / "actor")] < synced[str(partial)]
        and synced[str(partial / "state.json")] < synced[str(partial / "MANIFEST.json")]
    )
    assert disk_calls.index(("mkdir", str(folder))) < synced[str(run)], "the name `checkpoints` is on the disk"
    assert disk_calls[named + 1] == ("sync", str(folder)) and named + 1 < linked
    assert disk_calls[linked + 1] == ("sync", str(folder))


def test_the_next_checkpoint_waits_by_name_and_its_seconds_are_a_metric(saved, monkeypatch):
    opened, said, save = threading.Event(), [], module.save_tensors
    monkeypatch.setattr(module, "save_tensors", lambda *given: (opened.wait(), save(*given)))
    assert saved.wait_before(1, said.append)["time/checkpoint_wait_s"] < 0.2 and said == []
    saved.write(1, {"step": 1}, save_model, None, False)
    threading.Timer(0.5, opened.set).start()
    found = saved.wait_before(2, said.append)
    assert list(found) == ["time/checkpoint_wait_s"] and 0.4 < found["time/checkpoint_wait_s"] < 60
    assert said == ["the checkpoint of step 2 waits for that of step 1, which is still being written"]
    assert saved.latest().name == "step_00000001"
