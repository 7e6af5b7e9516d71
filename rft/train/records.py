"""What a run gives its trainer: what trains, what is written, and what is watched."""

from dataclasses import dataclass

from rft.actor.base import ColumnModel
from rft.batch.balance import Balance
from rft.evaluation.base import Canary, Evaluator
from rft.logger.log import RunLog
from rft.rollout.sampler import Sampler
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.diverged import NonFinitePolicy
from rft.train.observation import Profiler, Trajectories
from rft.train.stop import StopRequest
from rft.train.unsaved import UnsavedMemory


@dataclass(frozen=True)
class Trained:
    """The models of a run, and what they share.

    Attributes:
        models: the policy and the models beside it whose columns the algorithm reads, by their keys.
        copies: the models that begin every stage as a copy of the policy.
        balance: spreads work over the processes.
        sampler: samples text; the trainer publishes weights to it after every step.
    """

    models: dict[str, ColumnModel]
    copies: list[ColumnModel]
    balance: Balance
    sampler: Sampler


@dataclass(frozen=True)
class Output:
    """What a run writes.

    Attributes:
        log: where numbers go.
        checkpoints: where states go.
        trajectories: which steps and how many rows of sampled text are kept for people.
        profiler: traces the steps that are to be.
        rows: a hash of each data set, by its yaml key.
    """

    log: RunLog
    checkpoints: Checkpoints
    trajectories: Trajectories
    profiler: Profiler
    rows: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is looked at while a run trains, and what stops it.

    Attributes:
        evaluator: of the held-out sets; None if there are none.
        evaluates_at_start: whether the evaluator runs before the first step, too.
        canary: answers the canary tasks; None if there are none.
        nonfinite: what happens at an update that is not finite.
        stop: why the run has to stop after a step, if it has to.
        unsaved: finds what plugins remember and no checkpoint saves.
        exact: trainer and engine compute in float32 and sample without truncation, so that a gap is a mistake.
        max_unscored: the share of a step's rows that may have no score; with more the run stops.
    """

    evaluator: Evaluator | None
    evaluates_at_start: bool
    canary: Canary | None
    nonfinite: NonFinitePolicy
    stop: StopRequest
    unsaved: UnsavedMemory
    exact: bool
    max_unscored: float
