"""The order in which a checkpoint gets onto the disk, how long the next one waits for it, and where the last one goes
that the disk does not take."""

import re
import shutil
import threading
from dataclasses import replace
from functools import partial

import pytest

from rft import waits
from rft.distributed import start
from rft.train.checkpoint import checkpoints as module
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.checkpoint.options import CheckpointOptions

OPTIONS = CheckpointOptions(
    every=1, keep_last=2, keep_best=0, keep_every=0, export_every=1, fallback=None, export_dtype="auto"
)


@pytest.fixture
def saved(tmp_path):
    """The checkpoints of a new run."""
    run = tmp_path / "run"
    run.mkdir()
    return Checkpoints(run, OPTIONS, start("cpu"), "accuracy", pytest.fail)


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


def test_the_next_checkpoint_waits_by_name_and_its_seconds_are_a_metric(saved, monkeypatch, caplog):
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.05)
    opened, said, save = threading.Event(), [], module.save_tensors
    monkeypatch.setattr(module, "save_tensors", lambda *given: (opened.wait(), save(*given)))
    assert list(saved.wait_before(1, said.append)) == ["time/checkpoint_wait_s"] and said == []
    saved.write(1, {"step": 1}, save_model, None, False)
    threading.Timer(0.5, opened.set).start()
    found = saved.wait_before(2, said.append)
    assert list(found) == ["time/checkpoint_wait_s"] and 0.4 < found["time/checkpoint_wait_s"] < 60
    assert said == ["the checkpoint of step 2 waits for that of step 1, which is still being written"]
    assert caplog.messages[0] == f"the run waits for the writing of the checkpoint of step 1 to {saved.folder}, 0 s"
    assert saved.latest().name == "step_00000001"


@pytest.fixture
def made(tmp_path):
    """Makes the checkpoints of the run, which have a fallback or none; `warnings` has their warnings."""
    run, fallback = tmp_path / "run", tmp_path / "else" / "where"

    def make(with_fallback):
        run.mkdir(exist_ok=True)
        options = replace(OPTIONS, fallback=str(fallback) if with_fallback else None)
        found = Checkpoints(run, options, start("cpu"), "accuracy", lambda text: found.warnings.append(text))
        found.warnings = []
        return found

    return make


def test_a_last_checkpoint_that_cannot_be_begun_is_an_error_with_folder_cause_and_cure(made):
    saved = made(False)
    saved.write(1, {"step": 1}, save_model, None, False)
    assert saved.wait()
    save = partial(saved.write, 2, {"step": 2}, full_disk, None, True)
    save()
    text = (
        rf"^the last checkpoint could not be written to {saved.folder} \(.*No space left on device\), nor elsewhere "
        r"\(checkpoint.fallback=null\)\. Free space .* set checkpoint.fallback .* same command again: it continues "
        rf"from {saved.folder}/step_00000001$"
    )
    with pytest.raises(ValueError, match=text):
        saved.end(save)
    assert "could not be written" in saved.warnings[0] and len(saved.warnings) == 1


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_what_the_run_folder_does_not_take_is_written_to_the_fallback_and_read_after_it_is_moved(made):
    saved = made(True)
    saved.folder.write_text("no folder")
    save = partial(saved.write, 3, {"step": 3}, save_model, None, True)
    save()
    with pytest.raises(ValueError, match=r"the same command again: it continues from there") as caught:
        saved.end(save)
    place = saved.run.parent / "else" / "where"
    [where] = place.glob("run-*/step_00000003")
    assert f"({saved.run}/checkpoints" not in str(caught.value) and f"and is in {where} " in str(caught.value)
    again = made(True)
    again.folder.unlink()
    again.folder.mkdir()
    shutil.move(where, again.folder)
    found = again.read()
    assert found["step"] == 3 and again.warnings == []


def test_a_fallback_that_is_full_too_is_named_and_left_empty(made, tmp_path):
    saved = made(True)
    save = partial(saved.write, 3, {"step": 3}, full_disk, None, True)
    save()
    with pytest.raises(ValueError, match=r"nor elsewhere \(.*No space left on device\).* it continues from the beginn"):
        saved.end(save)
    assert list((tmp_path / "else" / "where").iterdir()) == []


@pytest.mark.parametrize("then", ["removed", "renamed", "replaced"])
def test_a_run_folder_that_is_gone_is_found_at_the_next_checkpoint(made, tmp_path, then):
    saved = made(True)
    saved.write(1, {"step": 1}, save_model, None, False)
    assert saved.wait()
    shutil.rmtree(saved.run) if then == "removed" else saved.run.rename(tmp_path / "other")
    if then == "replaced":
        saved.run.mkdir()
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(saved.run))} was removed or renamed while the run .* is in "
    ):
        saved.write(2, {"step": 2}, save_model, None, False)
    assert saved.run.exists() == (then == "replaced"), "no folder is made again"
    assert [path.name for path in (tmp_path / "else" / "where").glob("run-*/step*")] == ["step_00000002"]


def test_a_run_folder_that_is_gone_after_the_last_checkpoint_is_found_at_the_end(made, tmp_path):
    saved = made(True)
    save = partial(saved.write, 1, {"step": 1}, save_model, None, True)
    save()
    assert saved.wait()
    saved.run.rename(tmp_path / "other")
    with pytest.raises(ValueError, match="was removed or renamed"):
        saved.end(save)
    assert len(list((tmp_path / "else" / "where").glob("run-*/step_00000001"))) == 1
