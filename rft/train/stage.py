"""A part of a run: where its batches come from, what is done with them, and for how long."""

from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDict

from rft.actor.actor import Actor
from rft.actor.optim.optimizer import Optimizer
from rft.algorithm.algorithm import Algorithm
from rft.metrics import Metrics


class Source(Protocol):
    """Where batches come from."""

    temperature: float
    writes: tuple[str, ...]
    can_write: tuple[str, ...]

    def samples(self) -> bool:
        """Whether the engine answers for the next step; otherwise its texts are given. The same on every rank."""
        ...

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this rank."""
        ...

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes up the states of all ranks that wrote the checkpoint."""
        ...


@dataclass
class Stage:
    """A part of the run: a source, a method, and for how long.

    Attributes:
        name: "warmup" or "train".
        steps: at most this many.
        minibatches, epochs: optimizer steps per batch are their product.
        optimizer: the policy's, for this stage.
        eval_every: steps between evaluations; 0 for the ends of the stage alone.
        stop_at: ends the stage when the watched metric has reached this, or null.
        sampler: whose weights its batches are sampled with, where they are.
    """

    name: str
    source: Source
    algorithm: Algorithm
    steps: int
    minibatches: int
    epochs: int
    optimizer: Optimizer
    eval_every: int
    stop_at: float | None
    sampler: Actor

    def iteration(self, done: int) -> int:
        """How many of the steps that are done belong to the iteration that goes on."""
        return done % (self.algorithm.options.iteration or self.steps + 1)
