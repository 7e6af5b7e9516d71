"""One step of an algorithm, from top to bottom: what happens to a batch, and to each of its mini-batches.

1. `prepare_batch`: loss mask, old columns of the policy, columns of the other models, correction, advantages.
2. `select_rows`: the rows that train, and how often.
3. `prepare_mini_batch`: current columns of the policy, correction against it, statistics and weights of the loss. It
   returns the objectives that the trainer then minimises.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.mismatch import log_policy_mismatch
from rft.algorithm.objective import Update
from rft.algorithm.registries import AllRows, AllSum
from rft.algorithm.roles import POLICY, ROLES
from rft.metrics import Metrics

Compute = Callable[[str, TensorDict, tuple[str, ...]], dict[str, Tensor]]


@dataclass(frozen=True)
class StepContext:
    """What the trainer supplies for one step.

    Attributes:
        compute: from the key of a model, rows of the batch and the names of outputs to columns, (B, T) or (B, T, K)
            each, without gradients. A collective.
        all_sum: sums a tensor over all ranks.
        all_rows: an object of every rank, in a list.
        metrics: receives numbers.
        updates: optimizer steps on the batch.
        seed: of the step.
    """

    compute: Compute
    all_sum: AllSum
    all_rows: AllRows
    metrics: Metrics
    updates: int
    seed: int


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
    algorithm.estimate_advantages(batch, step.all_sum, step.metrics)


def select_rows(algorithm: Algorithm, batch: TensorDict, step: StepContext) -> TensorDict:
    """The rows of this rank that train; a row that trains twice is there twice."""
    return algorithm.select_rows(batch, step.all_rows, step.seed)


def prepare_mini_batch(
    algorithm: Algorithm, rows: TensorDict, moved: bool, seed: int, step: StepContext
) -> dict[str, Update]:
    """Adds what depends on the whole mini-batch, and returns the updates that follow, by the keys of their models.

    Args:
        rows: this rank's rows of the mini-batch.
        moved: the policy has been updated since the batch was prepared.
        seed: of this optimizer step.
    """
    sampled = "rollout_logprobs" in rows.keys()
    compare = sampled and "logprobs" not in algorithm.old_columns(step.updates)
    current = _current_columns(algorithm, rows, moved, step)
    if compare and "logprobs" in current:  # before anything is rejected
        log_policy_mismatch(step.metrics, current["logprobs"], rows)
    algorithm.prepare(current, rows, step.all_sum, seed, step.metrics)
    late = compare and "logprobs" not in current
    policy = Update(algorithm.policy, ("entropy",) if sampled else (), late)
    return {POLICY: policy, **{key: Update(objective) for key, objective in algorithm.learners.items()}}


def _current_columns(algorithm: Algorithm, rows: TensorDict, moved: bool, step: StepContext) -> dict[str, Tensor]:
    """What the algorithm needs of the current policy; its old columns while it has not moved."""
    wanted = algorithm.current_outputs
    if not wanted:
        return {}
    if not moved and algorithm.options.old_logprobs == "actor":
        return {name: rows[f"old_{name}"] for name in wanted}
    return step.compute(POLICY, rows, wanted)
