"""One step of an algorithm, from top to bottom: what happens to a batch, and to each of its mini-batches.

1. `prepare_batch`: loss mask, old columns of the policy, columns of the other models, correction, advantages.
2. `select_rows`: the rows that train, and how often.
3. `current_columns`: columns of the current policy for a mini-batch.
4. `prepare_mini_batch`: correction against the current policy, statistics and weights of the loss. It returns the
   objectives that the trainer then minimises.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.divergence import log_policy_mismatch
from rft.algorithm.objective import Update
from rft.algorithm.roles import POLICY, ROLES
from rft.batch.balance import Balance
from rft.batch.collate import dummy_row
from rft.distributed import World
from rft.metrics import Metrics


class ComputesColumns(Protocol):
    """What a step needs of a model."""

    def compute(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None = None
    ) -> dict[str, Tensor]:
        """Columns of the batch without gradients, as `rft.actor.base.ColumnModel.compute` does."""


@dataclass(frozen=True)
class StepContext:
    """What the trainer supplies for one step.

    Attributes:
        models: the policy and the models beside it, by their keys.
        balance: moves rows to the ranks that compute them.
        world: all processes.
        batch: this rank's rows of the step.
        temperature: the divisor of the logits.
        metrics: receives numbers.
        updates: optimizer steps on the batch.
        seed: of the step.
    """

    models: Mapping[str, ComputesColumns]
    balance: Balance
    world: World
    batch: TensorDict
    temperature: float
    metrics: Metrics
    updates: int
    seed: int

    def compute(self, key: str, rows: TensorDict, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """What a model computes of rows of the batch, (B, T) or (B, T, K) each, without gradients. A collective.

        Args:
            key: of the model.
            rows: this rank's.
            outputs: see `rft.actor.base.ColumnModel.compute`.
        """
        moved = self.balance.move(rows)
        columns = self.models[key].compute(moved.rows, outputs, self.temperature, dummy_row(self.batch, rows))
        return self.balance.restore(columns, rows, moved)


def prepare_batch(algorithm: Algorithm, batch: TensorDict, step: StepContext) -> None:
    """Adds every column that the algorithm needs before the update."""
    reads = algorithm.reads()
    algorithm.build_loss_mask(batch)
    if algorithm.options.old_logprobs == "rollout" and "old_logprobs" in reads:
        batch["old_logprobs"] = batch["rollout_logprobs"]
    if old := algorithm.old_columns(step.updates):
        outputs = step.compute(POLICY, batch, tuple(old))
        for output, column in old.items():
            batch[column] = outputs[output]
    if "logprobs" in old and "rollout_logprobs" in batch.keys():
        log_policy_mismatch(step.metrics, batch["old_logprobs"], batch)
    for role in ROLES:
        if columns := role.writes(reads):
            outputs = step.compute(role.key, batch, tuple(columns.values()))
            for column, output in columns.items():
                batch[column] = outputs[output]
    algorithm.estimate_advantages(batch, step.world.all_sum, step.metrics)


def select_rows(algorithm: Algorithm, batch: TensorDict, step: StepContext) -> TensorDict:
    """The rows of this rank that train; a row that trains twice is there twice."""
    return algorithm.select_rows(batch, step.world.gather, step.seed)


def current_columns(algorithm: Algorithm, rows: TensorDict, moved: bool, step: StepContext) -> dict[str, Tensor]:
    """What `prepare_mini_batch` needs of the current policy; its old columns while it has not moved.

    Args:
        rows: this rank's rows of the mini-batch.
        moved: the policy has been updated since the batch was prepared.
    """
    wanted = algorithm.current_outputs
    if not wanted:
        return {}
    if not moved and algorithm.options.old_logprobs == "actor":
        return {name: rows[f"old_{name}"] for name in wanted}
    return step.compute(POLICY, rows, wanted)


def prepare_mini_batch(
    algorithm: Algorithm, rows: TensorDict, current: dict[str, Tensor], seed: int, step: StepContext
) -> dict[str, Update]:
    """Adds what depends on the whole mini-batch, and returns the updates that follow, by the keys of their models.

    Args:
        rows: this rank's rows of the mini-batch.
        current: their `current_columns`.
        seed: of this optimizer step.
    """
    sampled = "rollout_logprobs" in rows.keys()
    compare = sampled and "logprobs" not in algorithm.old_columns(step.updates)
    if compare and "logprobs" in current:  # before anything is rejected
        log_policy_mismatch(step.metrics, current["logprobs"], rows)
    algorithm.prepare(current, rows, step.world.all_sum, seed, step.metrics)
    late = compare and "logprobs" not in current
    policy = Update(algorithm.policy, ("entropy",) if sampled else (), late)
    return {POLICY: policy, **{key: Update(objective) for key, objective in algorithm.learners.items()}}


class PreparedRows(NamedTuple):
    """What the models are updated with.

    Attributes:
        rows: that this rank trains.
        dummy: see `dummy_row`.
        updates: by the keys of the models.
    """

    rows: TensorDict
    dummy: TensorDict
    updates: dict[str, Update]


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step of every model, before `prepare_mini_batch`.

    Attributes:
        batch: this rank's rows of the step.
        rows: those of the mini-batch.
        current: their `current_columns`.
        seed: of the optimizer step.
    """

    algorithm: Algorithm
    batch: TensorDict
    rows: TensorDict
    current: dict[str, Tensor]
    seed: int

    def prepare(self, step: StepContext) -> PreparedRows:
        """Prepares a copy of the rows and moves them to the ranks that train them. A collective."""
        rows = self.rows.clone(recurse=False)
        updates = prepare_mini_batch(self.algorithm, rows, self.current, self.seed, step)
        return PreparedRows(step.balance.rows(rows, step.metrics), dummy_row(self.batch, rows), updates)

    def without(self, units: list[int]) -> "MiniBatch":
        """The mini-batch without the rows of some units; all ranks leave out the same units."""

        def kept(batch: TensorDict) -> Tensor:
            return ~torch.isin(batch["unit"], torch.tensor(units, dtype=torch.int64))

        rows, others = kept(self.rows), kept(self.batch)
        batch = self.batch[others] if others.any() else self.batch
        current = {name: column[rows] for name, column in self.current.items()}
        return replace(self, batch=batch, rows=self.rows[rows], current=current)
