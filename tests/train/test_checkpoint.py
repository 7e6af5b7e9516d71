"""What a run writes, what stays of it, and what it is taken up from."""

import json
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from rft.actor.base import NonFiniteError
from rft.train.checkpoint import CheckpointOptions, Checkpoints


def checkpoints(run, every=1, keep_last=2, keep_best=0, rank=0, watched="eval/heldout/accuracy"):
    return Checkpoints(run, CheckpointOptions(every, keep_last, keep_best), SimpleNamespace(rank=rank), watched)


def save_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def write(saved, step, metric=None):
    saved.write(step, {"step": step}, save_model, metric)


def steps(run):
    return [int(path.name.removeprefix("step_")) for path in sorted((run / "checkpoints").glob("step_*"))]


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_due(tmp_path, every, due):
    saved = checkpoints(tmp_path, every=every)
    assert [step for step in range(1, 7) if saved.due(step)] == due


def test_nothing_to_go_on_from(tmp_path):
    saved = checkpoints(tmp_path)
    assert saved.latest() is None and saved.read() is None


def test_what_is_written_is_read(tmp_path):
    saved = checkpoints(tmp_path)
    state = {"step": 10, "actors": {"actor": {"w": torch.arange(3.0)}}, "sources": [{"position": 7}]}
    saved.write(10, state, save_model, 0.25)
    folder = tmp_path / "checkpoints" / "step_00000010"
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "metric.json", "state.pt"]
    assert (folder / "actor" / "config.json").exists()
    assert json.loads((folder / "metric.json").read_text()) == 0.25
    found = checkpoints(tmp_path).read()
    assert torch.equal(found["actors"]["actor"].pop("w"), torch.arange(3.0))
    assert found == {"step": 10, "actors": {"actor": {}}, "sources": [{"position": 7}]}


@pytest.mark.parametrize("target", [None, "step_00000030"])
def test_a_link_that_is_gone_or_leads_nowhere_hides_no_checkpoint(tmp_path, target):
    for step in (10, 20):
        checkpoints(tmp_path).write(step, {"step": step}, save_model, None)
    link = tmp_path / "checkpoints" / "latest"
    link.unlink()
    if target is not None:
        link.symlink_to(target)
    assert checkpoints(tmp_path).read() == {"step": 20}


def test_a_damaged_state_is_named_with_the_cure(tmp_path):
    checkpoints(tmp_path).write(10, {"step": 10}, save_model, None)
    file = tmp_path / "checkpoints" / "step_00000010" / "state.pt"
    for damaged in (file.read_bytes()[:100], b"", b"x", None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{file} cannot be read \(.*set resume=never to start again"):
            checkpoints(tmp_path).read()


def test_latest_links_to_the_newest_and_moves_with_the_run(tmp_path):
    saved = checkpoints(tmp_path / "a")
    for step in (1, 2):
        write(saved, step)
    link = tmp_path / "a" / "checkpoints" / "latest"
    assert link.is_symlink() and str(link.readlink()) == "step_00000002"
    (tmp_path / "a").rename(tmp_path / "b")
    assert checkpoints(tmp_path / "b").read() == {"step": 2}


def test_of_a_loss_the_lowest_stays(tmp_path):
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
def test_what_stays(tmp_path, keep_last, keep_best, metrics, expected):
    saved = checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best)
    for step, metric in enumerate(metrics, start=1):
        write(saved, step, metric)
    assert steps(tmp_path) == expected
    assert saved.read() == {"step": 4}


def test_a_folder_that_was_cut_short_does_not_count(tmp_path):
    saved = checkpoints(tmp_path, keep_last=1)
    write(saved, 1)

    def killed(folder):
        save_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved.write(2, {"step": 2}, killed, None)
    assert steps(tmp_path) == [1]
    assert checkpoints(tmp_path).read() == {"step": 1}
    write(saved, 2)
    assert steps(tmp_path) == [2]
    assert saved.read() == {"step": 2}
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000002"]


def test_the_same_step_is_written_anew(tmp_path):
    saved = checkpoints(tmp_path)
    write(saved, 1)
    saved.write(1, {"step": 1, "again": True}, save_model, None)
    assert saved.read() == {"step": 1, "again": True}


def test_other_ranks_take_part_and_write_nothing(tmp_path):
    asked = []
    checkpoints(tmp_path, rank=1).write(1, {}, asked.append, None)
    assert len(asked) == 1
    assert not list(tmp_path.iterdir())


def test_an_inquest_saves_the_rows_and_says_where_to_look(tmp_path):
    batch = TensorDict({"advantages": torch.tensor([[0.0, float("nan")], [1.0, 2.0]])}, batch_size=[2])
    problem = NonFiniteError("critic", {"advantages": [0], "values": list(range(40))}, batch)
    error = checkpoints(tmp_path, rank=1).dump_nonfinite(12, problem)
    path = tmp_path / "diverged" / "step_00000012_rank_1.pt"
    assert isinstance(error, ValueError)
    for part in (
        "step 12: the loss or the gradient of the critic is not finite",
        f"on rank 1: column 'advantages' in rows [0]; column 'values' in rows {list(range(16))}.",
        str(path),
        "critic.optimizer.lr",
    ):
        assert part in str(error)
    saved = torch.load(path, weights_only=False)
    assert saved["advantages"].isnan().tolist() == [[False, True], [False, False]]


def test_an_inquest_without_a_suspect_says_so(tmp_path):
    batch = TensorDict({"advantages": torch.zeros(1, 2)}, batch_size=[1])
    assert "none of its columns" in str(checkpoints(tmp_path).dump_nonfinite(1, NonFiniteError("actor", {}, batch)))


def test_a_weight_that_is_not_finite_names_the_last_checkpoint(tmp_path):
    saved = checkpoints(tmp_path)
    assert str(saved.nonfinite_weight(0, "actor", "w")).startswith("actor.path: the weight w is not finite as it was")
    assert str(saved.nonfinite_weight(1, "actor", "w")).endswith("there is none before it")
    write(saved, 1)
    said = str(saved.nonfinite_weight(2, "actor", "w"))
    assert said.startswith("step 2: the weight w of the actor is not finite after the update. Likely causes: actor.opt")
    assert said.endswith(str(tmp_path / "checkpoints" / "step_00000001"))


def test_what_a_kill_left(tmp_path):
    """The process is killed after a checkpoint has its name, and before another one is removed."""
    for step in (10, 20, 30):
        checkpoints(tmp_path, keep_last=3).write(step, {"step": step}, save_model, None)
    assert checkpoints(tmp_path, keep_last=2).read()["step"] == 30
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_00000020", "step_00000030"]


def test_the_checkpoint_of_another_run_is_read_until_there_is_one_of_its_own(tmp_path):
    checkpoints(tmp_path / "first").write(10, {"step": 10}, save_model, None)
    options = CheckpointOptions(0, 2, 0)
    second = Checkpoints(tmp_path / "second", options, SimpleNamespace(rank=0), "eval/accuracy",
                         source=tmp_path / "first" / "checkpoints" / "step_00000010")  # fmt: skip
    assert second.read()["step"] == 10
    second.write(11, {"step": 11}, save_model, None)
    assert second.read()["step"] == 11
    assert (tmp_path / "first" / "checkpoints" / "step_00000010").exists()
