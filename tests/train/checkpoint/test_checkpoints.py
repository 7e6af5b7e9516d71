"""What a run writes, what stays of it, and what it is taken up from."""

import os
import shutil
import threading
import time

import pytest
import torch

from rft.distributed import start
from rft.train.checkpoint import checkpoints as module
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.checkpoint.manifest import damage, read_manifest
from rft.train.checkpoint.options import CheckpointOptions
from rft.train.folder.run_folder import RunCommand, RunFolder
from tests.conftest import SOON_S
from tests.helpers import identical

ACCURACY = "eval/heldout/accuracy"
SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def checkpoints():
    """Makes the checkpoints of a run; `warnings` has their warnings."""
    world = start("cpu")

    def make(
        run,
        every=1,
        keep_last=2,
        keep_best=0,
        keep_every=0,
        export_every=1,
        fallback=None,
        watched=ACCURACY,
        source=None,
        seed=0,
    ):
        run.mkdir(exist_ok=True)
        options = CheckpointOptions(every, keep_last, keep_best, keep_every, export_every, fallback, "auto")
        command = RunCommand(run, {"seed": seed, "actor": {"lr": 1e-6}, "logger": f"of {seed}"}, 3, frozenset())
        chosen = RunFolder(run, [], source, command)
        made = Checkpoints(run, options, world, watched, lambda text: made.warnings.append(text), chosen)
        made.warnings = []
        return made

    return make


def save_model(folder, _=None):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def write(saved, step, metric=None, last=False):
    saved.write(step, {"step": step, "w": torch.full((3,), float(step))}, save_model, metric, last)
    assert saved.wait()


def steps(run):
    return [int(path.name.removeprefix("step_")) for path in sorted((run / "checkpoints").glob("step_*"))]


def newest(saved):
    return saved.read()["step"]


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_due(tmp_path, checkpoints, every, due):
    saved = checkpoints(tmp_path, every=every)
    assert [step for step in range(1, 7) if saved.due(step)] == due


def test_nothing_to_go_on_from(tmp_path, checkpoints):
    saved = checkpoints(tmp_path)
    assert saved.latest() is None and saved.read() is None


def test_what_is_written_is_read(tmp_path, checkpoints):
    saved = checkpoints(tmp_path)
    state = {"step": 10, "actors": {"actor": {"network": {"w": torch.arange(3.0)}, "optimizer": {"m": torch.ones(2)}}}}
    saved.write(10, state | {"sources": [{"position": 7, "row": (1, torch.eye(2))}]}, save_model, 0.25, False)
    state["actors"]["actor"]["network"]["w"].zero_()  # the run goes on while the thread writes
    assert saved.wait()
    folder = tmp_path / "checkpoints" / "step_00000010"
    assert sorted(path.name for path in folder.iterdir()) == [
        "MANIFEST.json", "actor", "shard-00001-model-00001-of-00001.safetensors", "state.json"
    ]  # fmt: skip
    assert damage(folder) is None
    assert [read_manifest(folder)[key] for key in ("step", "metric", "ranks")] == [10, 0.25, 1]
    found = checkpoints(tmp_path).read()
    assert identical(found["actors"]["actor"]["network"]["w"], torch.arange(3.0))
    assert identical(found["sources"], [{"position": 7, "row": (1, torch.eye(2))}])
    template = {"network": {"w": torch.zeros(3)}, "optimizer": {"m": torch.zeros(2)}}
    part = found.fill("actors", "actor", template, left_out=("optimizer",))
    assert part["network"]["w"].data_ptr() == template["network"]["w"].data_ptr() and part.keys() == {"network"}
    assert identical(template, {"network": {"w": torch.arange(3.0)}, "optimizer": {"m": torch.zeros(2)}})


@pytest.mark.parametrize("target", [None, "step_00000030"])
def test_a_link_that_is_gone_or_leads_nowhere_hides_no_checkpoint(tmp_path, checkpoints, target):
    for step in (10, 20):
        write(checkpoints(tmp_path), step)
    link = tmp_path / "checkpoints" / "latest"
    link.unlink()
    if target is not None:
        link.symlink_to(target)
    assert newest(checkpoints(tmp_path)) == 20
    assert str(link.readlink()) == "step_00000020", "the link is mended"


@pytest.mark.parametrize("file", ["state.json", "MANIFEST.json", SHARD, "actor/config.json"])
@pytest.mark.parametrize("content", [b"", b"x", None])
def test_of_a_damaged_checkpoint_the_one_before_is_read(tmp_path, checkpoints, file, content):
    for step in (10, 20):
        write(checkpoints(tmp_path), step)
    folder = tmp_path / "checkpoints" / "step_00000020"
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    saved = checkpoints(tmp_path)
    assert newest(saved) == 10
    assert saved.warnings[0].startswith(f"the checkpoint {folder} is damaged: {file} ")
    assert (tmp_path / "checkpoints" / "damaged_step_00000020").is_dir()
    assert str((tmp_path / "checkpoints" / "latest").readlink()) == "step_00000010"
    write(saved, 20)
    assert steps(tmp_path) == [10, 20] and newest(checkpoints(tmp_path)) == 20


def test_a_checkpoint_that_is_damaged_again_is_set_aside_again(tmp_path, checkpoints):
    write(checkpoints(tmp_path), 10)
    for _ in range(3):
        write(checkpoints(tmp_path), 20)
        (tmp_path / "checkpoints" / "step_00000020" / "state.json").unlink()
        assert newest(checkpoints(tmp_path)) == 10
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("damaged_*"))
    assert names == ["damaged_step_00000020", "damaged_step_00000020_again", "damaged_step_00000020_again_again"]


def test_what_is_damaged_does_not_count_among_the_last(tmp_path, checkpoints):
    """With keep_last=1, a copy under the name of a later step."""
    saved = checkpoints(tmp_path, keep_last=1)
    write(saved, 10)
    shutil.copytree(tmp_path / "checkpoints" / "step_00000010", tmp_path / "checkpoints" / "step_00000090")
    assert newest(checkpoints(tmp_path, keep_last=1)) == 10 and steps(tmp_path) == [10]


def test_a_checkpoint_of_another_run_is_set_aside(tmp_path, checkpoints):
    """One that was copied into the folder; other keys than those that change weights are not compared."""
    write(checkpoints(tmp_path), 10)
    write(checkpoints(tmp_path / "other", seed=1), 20)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step_00000020", tmp_path / "checkpoints" / "step_00000020")
    saved = checkpoints(tmp_path)
    assert newest(saved) == 10
    assert "step_00000020 is damaged: it is of another run: seed (1 there, 0 here); it is renamed" in saved.warnings[0]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_checkpoints_that_are_no_folder_are_an_error(tmp_path, checkpoints, kind):
    folder = tmp_path / "checkpoints"
    folder.symlink_to("/nowhere") if kind == "link" else folder.write_text("")
    with pytest.raises(ValueError, match="checkpoints is not a folder, or links to a folder that is not there"):
        checkpoints(tmp_path).read()


def test_where_all_are_damaged_each_is_named(tmp_path, checkpoints):
    for step in (10, 20):
        write(checkpoints(tmp_path), step)
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(step_00000020: state.json is missing; "):
        checkpoints(tmp_path).read()
    assert steps(tmp_path) == [10, 20], "nothing is renamed"


@pytest.mark.parametrize("name", ["step_x", "step_00000030.bak", ".DS_Store", "notes.txt", ".step_00000030.partial"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_stray_file_is_no_checkpoint(tmp_path, checkpoints, name, kind):
    write(checkpoints(tmp_path), 10)
    stray = tmp_path / "checkpoints" / name
    stray.mkdir() if kind == "folder" else stray.write_text("x")
    saved = checkpoints(tmp_path, keep_last=1)
    assert newest(saved) == 10
    write(saved, 20)
    assert newest(saved) == 20 and not saved.warnings


def test_a_write_that_fails_is_a_warning_and_the_checkpoint_before_stays(tmp_path, checkpoints, monkeypatch):
    saved = checkpoints(tmp_path)
    write(saved, 10)

    def full(*_):
        raise OSError(28, "No space left on device")

    for part in ("save_tensors", "describe", "write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, full)
            saved.write(20, {"step": 20}, save_model, None, False)
            assert not saved.wait()
    saved.write(20, {"step": 20}, full, None, False)
    assert not saved.wait() and not saved.wait(), "a warning is not repeated"
    assert len(saved.warnings) == 4 and all(
        text.startswith("the checkpoint of step 20 could not be written ([Errno 28] No space left on device); ")
        and text.endswith("step_00000010 stays the newest, and the run continues")
        for text in saved.warnings
    )
    assert newest(saved) == 10
    write(saved, 20)
    assert newest(saved) == 20
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest", "step_00000010", "step_00000020"
    ]  # fmt: skip


def test_the_end_of_a_run_needs_its_last_checkpoint(tmp_path, checkpoints, monkeypatch):
    saved = checkpoints(tmp_path)
    monkeypatch.setattr(module, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError("full")))
    saved.write(20, {"step": 20}, save_model, None, True)
    with pytest.raises(
        ValueError, match=r"^the canary; the last checkpoint could not be written to .*checkpoints \(full"
    ):
        saved.end(pytest.fail, "the canary")


def test_the_run_continues_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, checkpoints, monkeypatch):
    saved, may_end, order = checkpoints(tmp_path), threading.Event(), []
    whole = module.write_manifest

    def slow(*given):
        assert may_end.wait(SOON_S)
        order.append("written")
        whole(*given)

    monkeypatch.setattr(module, "write_manifest", slow)
    saved.write(1, {"step": 1}, save_model, None, False)
    order.append("the run continues")
    assert steps(tmp_path) == []
    threading.Timer(0.2, may_end.set).start()
    saved.write(2, {"step": 2}, lambda folder, _: (order.append("the next one"), save_model(folder)), None, False)
    assert order == ["the run continues", "written", "the next one"] and steps(tmp_path) == [1]
    assert saved.wait() and steps(tmp_path) == [1, 2]


def test_after_an_error_of_the_run_a_checkpoint_is_still_written(tmp_path, checkpoints, monkeypatch):
    saved, whole = checkpoints(tmp_path), module.write_manifest
    monkeypatch.setattr(module, "write_manifest", lambda *given: (time.sleep(0.3), whole(*given)))
    saved.write(1, {"step": 1}, save_model, None, False)
    saved.close()
    assert newest(checkpoints(tmp_path)) == 1


def test_a_run_that_has_ended_leaves_no_file_descriptor_open(tmp_path, checkpoints):
    """The jobs of a sweep are runs of one process."""

    def run(step):
        saved = checkpoints(tmp_path)
        write(saved, step)
        saved.close()
        return len(os.listdir("/proc/self/fd"))

    assert run(1) == run(2)


def exported(run):
    return [int(path.parent.name.removeprefix("step_")) for path in sorted((run / "checkpoints").glob("step_*/actor"))]


def test_the_model_is_exported_every_so_many_checkpoints_and_at_the_end_of_a_stage(tmp_path, checkpoints):
    saved = checkpoints(tmp_path, every=2, keep_last=9, export_every=3)
    for step in (2, 4, 5, 6, 8, 10, 12, 13):
        write(saved, step, last=step in (5, 13))
    assert exported(tmp_path) == [5, 6, 12, 13]


@pytest.mark.parametrize("stopped", [1, 4, 7])
def test_a_resumed_run_exports_the_models_of_an_uninterrupted_one(tmp_path, checkpoints, stopped):
    """A stop writes a checkpoint between two others; each process makes its own `Checkpoints`."""
    for step in range(1, 13):
        if step in (1, stopped + 1):
            saved = checkpoints(tmp_path, every=2, keep_last=12, export_every=2)
        if saved.due(step) or step == stopped:
            write(saved, step)
            assert steps(tmp_path)[-1] == step
    assert exported(tmp_path) == [4, 8, 12]


def test_each_checkpoint_has_the_model_if_all_are_exported(tmp_path, checkpoints):
    for run, every, expected in ((tmp_path / "steps", 2, [2, 3]), (tmp_path / "stages", 0, [3])):
        saved = checkpoints(run, every=every, keep_last=9)
        for step in (2, 3):
            write(saved, step)
        assert exported(run) == expected


def test_a_checkpoint_that_only_a_stop_has_written_takes_the_place_of_no_other(tmp_path, checkpoints):
    """It stays while it is the newest."""
    saved = checkpoints(tmp_path, every=2, keep_last=2)
    for step, expected in ((2, [2]), (4, [2, 4]), (5, [2, 4, 5]), (6, [4, 6]), (7, [4, 6, 7]), (8, [6, 8])):
        write(saved, step)
        assert steps(tmp_path) == expected
    write(saved, 9, last=True)
    assert steps(tmp_path) == [8, 9], "the end of a stage is no stop"


def test_multiples_stay(tmp_path, checkpoints):
    saved = checkpoints(tmp_path, keep_last=1, keep_every=3)
    for step in range(1, 9):
        write(saved, step)
    assert steps(tmp_path) == [3, 6, 8]


def test_latest_links_to_the_newest_and_moves_with_the_run(tmp_path, checkpoints):
    saved = checkpoints(tmp_path / "a")
    for step in (1, 2):
        write(saved, step)
    link = tmp_path / "a" / "checkpoints" / "latest"
    assert link.is_symlink() and str(link.readlink()) == "step_00000002"
    (tmp_path / "a").rename(tmp_path / "b")
    assert newest(checkpoints(tmp_path / "b")) == 2


def test_of_a_loss_the_lowest_stays(tmp_path, checkpoints):
    saved = checkpoints(tmp_path, keep_last=1, keep_best=1, watched="eval/heldout/loss")
    for step, metric in enumerate([0.5, 0.2, 0.9, 0.3], start=1):
        write(saved, step, metric)
    assert steps(tmp_path) == [2, 4]


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "metrics", "expected"),
    [
        (2, 0, [0.9, 0.1, 0.2, 0.3], [3, 4]),
        (1, 0, [0.9, 0.1, 0.2, 0.3], [4]),
        (0, 0, [0.9, 0.1, 0.2, 0.3], [4]),  # the newest always stays: the run goes on from it
        (1, 1, [0.9, 0.1, 0.2, 0.3], [1, 4]),
        (1, 2, [0.5, 0.9, 0.2, 0.3], [1, 2, 4]),
        (1, 1, [0.5, 0.2, 0.2, 0.9], [4]),  # the best is the newest
        (1, 1, [0.5, 0.5, 0.2, 0.1], [2, 4]),  # of equals the later
        (1, 1, [None, 0.1, None, None], [2, 4]),  # a checkpoint without a metric is never the best
        (1, 3, [None, None, None, None], [4]),
        (9, 9, [0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]),
    ],
)
def test_what_stays(tmp_path, checkpoints, keep_last, keep_best, metrics, expected):
    saved = checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best)
    for step, metric in enumerate(metrics, start=1):
        write(saved, step, metric)
    assert steps(tmp_path) == expected
    assert newest(saved) == 4


def test_a_run_that_was_killed_leaves_nothing_behind(tmp_path, checkpoints):
    """Between two writes of a checkpoint, in a removal, or between a removal and the next."""
    saved = checkpoints(tmp_path, keep_last=9)
    for step in (1, 2, 3):
        write(saved, step)
    folder = tmp_path / "checkpoints"
    (folder / ".step_00000004.partial" / "actor").mkdir(parents=True)
    (folder / "step_00000001").rename(folder / ".step_00000001.removed")
    (folder / ".latest.partial").symlink_to("step_00000003")
    saved = checkpoints(tmp_path, keep_last=1)
    assert newest(saved) == 3 and not saved.warnings
    assert sorted(os.listdir(folder)) == ["latest", "step_00000003"]


def test_what_a_kill_left_is_pruned(tmp_path, checkpoints):
    """The process is killed after a checkpoint has its name, and before another one is removed."""
    saved = checkpoints(tmp_path, keep_last=3)
    for step in (10, 20, 30):
        write(saved, step)
    assert newest(checkpoints(tmp_path, keep_last=2)) == 30
    assert steps(tmp_path) == [20, 30]


def test_the_checkpoint_of_another_run_is_read_until_there_is_one_of_its_own(tmp_path, checkpoints):
    write(checkpoints(tmp_path / "first"), 10)
    source = tmp_path / "first" / "checkpoints" / "step_00000010"
    second = checkpoints(tmp_path / "second", source=source)
    assert newest(second) == 10 and second.latest() == source
    write(second, 11)
    assert newest(second) == 11
    (source / "state.json").unlink()
    with pytest.raises(ValueError, match=r"resume: the checkpoint .*step_00000010 is damaged: state.json is missing; "):
        checkpoints(tmp_path / "third", source=source).read()
    assert source.is_dir(), "that of another run is not renamed"


def test_the_same_step_is_written_anew(tmp_path, checkpoints):
    saved = checkpoints(tmp_path)
    write(saved, 1)
    saved.write(1, {"step": 1, "again": True}, save_model, None, False)
    assert saved.wait() and saved.read()["again"] is True
