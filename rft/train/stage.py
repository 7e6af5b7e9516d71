"""A part of a run: where its batches come from, what is done with them, for how long, and in which phases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rft.actor.base import ColumnModel
from rft.actor.optim.optimizer import Optimizer
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.roles import POLICY
from rft.data.base import Source
from rft.evaluation.base import measured
from rft.logger.history import rank_key
from rft.stateful import Stateful
from rft.train.schedules import Schedule


class Phase(StrEnum):
    """What the trainer does at a time; a message about an error names it."""

    BEGIN = "start of a stage"
    ROLLOUT = "rollout"
    COLUMNS = "columns"
    UPDATE = "update"
    PUBLISH = "publish"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"


@dataclass
class Stage:
    """A part of the run: a source, a method, and for how long.

    Attributes:
        name: "warmup" or "train".
        steps: at most this many.
        optimizer: the policy's, for this stage.
        eval_every: steps between evaluations; 0 for the ends of the stage alone.
        minibatches, epochs: optimizer steps per batch are their product.
        stop_at: ends the stage when the watched metric has reached this, or null.
        sampler: key of the model whose weights its batches are sampled with, where they are.
        schedules: which models train in a step, and what happens between steps.
    """

    name: str
    source: Source
    algorithm: Algorithm
    steps: int
    optimizer: Optimizer
    eval_every: int
    minibatches: int = 1
    epochs: int = 1
    stop_at: float | None = None
    sampler: str = POLICY
    schedules: Sequence[Schedule] = ()

    @property
    def parts(self) -> dict[str, Stateful]:
        """What remembers earlier steps of the stage, by its key in a checkpoint."""
        return {"algorithm": self.algorithm, "source": self.source}

    def ended(self, number: int, saved: Mapping[str, Any]) -> bool:
        """True if this stage, the one with this number, was at its end when a checkpoint was written.

        A stage without `stop_at` that has more steps now is not at its end.
        """
        longer = self.stop_at is None and saved["stage_step"] < self.steps
        return number < saved["stage"] or (number == saved["stage"] and saved["stage_done"] and not longer)

    def reached(self, watched: str, numbers: Mapping[str, float]) -> bool:
        """True where the watched metric is at `stop_at` or better."""
        if self.stop_at is None or (value := measured(numbers, watched)) is None:
            return False
        return rank_key(watched, value) >= rank_key(watched, self.stop_at)

    def trains(self, key: str, stage_step: int) -> bool:
        """True where the model with this key trains in this step of the stage."""
        return all(schedule.trains(key, stage_step) for schedule in self.schedules)

    def updates(self, key: str) -> int:
        """Optimizer steps of a model over the whole stage."""
        steps = sum(self.trains(key, step) for step in range(1, self.steps + 1))
        return steps * self.minibatches * self.epochs

    def after_step(self, stage_step: int, models: Mapping[str, ColumnModel]) -> None:
        """What the schedules do between two steps."""
        for schedule in self.schedules:
            schedule.after_step(stage_step, models)

    def weights_age(self, key: str, done: int) -> int:
        """Steps since the weights of a model beside the policy were replaced, of the `done` steps of the stage."""
        return min([done, *(schedule.weights_age(key, done) for schedule in self.schedules)])


def steps_in_all(stages: Sequence[Stage], saved: Mapping[str, Any]) -> str:
    """The steps of a run that continues from a checkpoint: `200`, or `at most 200` where `stop_at` may end a stage."""
    open_stages = [(number, stage) for number, stage in enumerate(stages) if not stage.ended(number, saved)]
    total = saved["step"] + sum(stage.steps for _, stage in open_stages)
    total -= sum(saved["stage_step"] for number, _ in open_stages if number == saved["stage"])
    return f"{'at most ' * any(stage.stop_at is not None for _, stage in open_stages)}{total}"
