"""How many steps a run that continues has in all."""

import pytest

from rft.train.stage import Stage, steps_in_all


def stages(stop_at=None):
    warmup = Stage(name="warmup", source=None, algorithm=None, steps=20, optimizer=None, eval_every=0, stop_at=stop_at)
    return [warmup, Stage(name="train", source=None, algorithm=None, steps=60, optimizer=None, eval_every=0)]


@pytest.mark.parametrize(
    ("stop_at", "saved", "total"),
    [
        (None, {"step": 5, "stage": 0, "stage_step": 5, "stage_done": False}, "80"),
        (0.9, {"step": 5, "stage": 0, "stage_step": 5, "stage_done": False}, "at most 80"),
        (0.9, {"step": 12, "stage": 0, "stage_step": 12, "stage_done": True}, "72"),
        (0.9, {"step": 42, "stage": 1, "stage_step": 30, "stage_done": False}, "72"),
        (None, {"step": 60, "stage": 1, "stage_step": 40, "stage_done": True}, "80"),  # a run of 40 steps gets 60
    ],
)
def test_a_stage_that_has_ended_early_takes_no_more_steps(stop_at, saved, total):
    assert steps_in_all(stages(stop_at), saved) == total
