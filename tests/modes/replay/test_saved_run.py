"""What mode=replay reads of a run folder, and what may differ from it."""

import json

import pytest

from rft.modes.replay.saved_run import SavedRun
from rft.train.checkpoint.manifest import describe, write_manifest
from rft.train.checkpoint.names import step_of

CONFIG = {
    "mode": "train",
    "steps": 9,
    "seed": 0,
    "algorithm": {"loss": {"name": "ppo_clip", "clip": 0.2}, "group_size": 4},
}


@pytest.fixture
def run(tmp_path):
    """A run of a warm-up of two steps and three of training, with checkpoints at 2 and 4."""
    rows = [(0, "warmup"), (1, "warmup"), (2, "warmup"), (3, "train"), (4, "train"), (5, "train")]
    lines = [json.dumps({"step": step, "stage": stage, "grad_norm": step / 2}) + "\n" for step, stage in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        write_manifest(folder, {"state.json": describe(folder / "state.json")}, {"step": step, "metric": None})
    return SavedRun(tmp_path, CONFIG)


def with_loss(**loss):
    return CONFIG | {"mode": "replay", "algorithm": CONFIG["algorithm"] | {"loss": loss}}


def test_the_numbers_of_a_step(run):
    assert run.logged(4) == {"grad_norm": 2.0}
    with pytest.raises(ValueError, match=r"replay.step=2 is a step of the warm-up.*choose one from 3 to 5"):
        run.logged(2)
    with pytest.raises(ValueError, match=r"replay.step=6 is no step .* logged the steps 3 to 5"):
        run.logged(6)


@pytest.mark.parametrize(("step", "before"), [(5, 4), (4, 2), (3, 2)])
def test_the_newest_checkpoint_before_a_step(run, step, before):
    path, damaged = run.start(step)
    assert path.name == f"step_{before:08d}" and step_of(path) == before and not damaged


def test_a_damaged_checkpoint_is_not_read(run):
    broken = run.folder / "checkpoints" / "step_00000004"
    (broken / "state.json").write_text("[]")
    path, damaged = run.start(5)
    assert path.name == "step_00000002" and damaged == {broken: "state.json has changed since it was written"}


def test_a_step_before_every_checkpoint_begins_where_the_run_began(run, tmp_path):
    assert run.start(2) == (None, {}) and step_of(None) == 0
    other = tmp_path / "other" / "step_00000001"
    assert SavedRun(run.folder, CONFIG | {"resume": str(other)}).start(2) == (other, {})


def test_the_algorithm_may_differ(run):
    found = run.changes(with_loss(name="gspo", clip=0.2), ())
    assert found == [("algorithm.loss.name", "ppo_clip", "gspo")]
    assert run.changes(CONFIG | {"mode": "replay", "max_time": "1h", "replay": {"step": 3}}, ()) == []


def test_what_makes_the_rows_or_the_weights_may_not(run):
    with pytest.raises(
        ValueError, match=r"only keys of algorithm may differ .* seed \(0 there, 1 here\).* Add: seed=0"
    ):
        run.changes(with_loss(name="gspo", clip=0.2) | {"seed": 1}, ())
    with pytest.raises(ValueError, match=r"algorithm.group_size \(4 there, 2 here\) may not .*: the rows are sampled"):
        run.changes(CONFIG | {"algorithm": CONFIG["algorithm"] | {"group_size": 2}}, ())
    assert run.changes(CONFIG | {"seed": 1}, ["seed"]) == [], "the run does not read it"


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run with a config.yaml; set output_dir"):
        SavedRun.of(tmp_path)
