"""Compares a step that was taken with the algorithm of the run with the same step of another algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rft.modes.replay.recorder import StepRecord, UpdateRecord
from rft.modes.replay.step import Taken

CLOCK = ("time/", "throughput/", "memory/", "engine/")  # metrics that a second run cannot repeat
ROUNDING = 1e-5  # gradients of tokens that differ by less than this share of the largest one count as equal
MOST = 10_000  # tokens of a list

Pair = tuple[float | None, float | None]  # of the run, of the command; None where one has no such number


@dataclass(frozen=True)
class TokenChange:
    """A token whose gradient differs.

    Attributes:
        update: number of the update, from 1.
        row, position: of the token in the batch.
        ratio: of the current to the old policy, in the update of the run.
        run, command: gradient of the loss with respect to the log-probability of the token.
    """

    update: int
    row: int
    position: int
    ratio: float
    run: float
    command: float


@dataclass(frozen=True)
class UpdateComparison:
    """One update of the policy with both algorithms.

    Attributes:
        loss, grad_norm: of both.
        cosine: between the two gradients of the weights; None if one of them is zero.
        tokens: that train with one of the two.
        differ: tokens whose gradients differ, among them
        lost: those whose gradient is zero with the command alone,
        gained: with the run alone,
        turned: and those with opposite signs.
    """

    loss: Pair
    grad_norm: Pair
    cosine: float | None
    tokens: int
    differ: int
    lost: int
    gained: int
    turned: int


@dataclass(frozen=True)
class Comparison:
    """A step that was taken with both algorithms.

    Attributes:
        compared: numbers that the run logged and the step with its algorithm has, too, the unequal ones among them.
        unequal: those of them that differ; logged, and now.
        numbers: those of the step that differ between the algorithms.
        updates: of the policy, in order.
        tokens: those whose gradients differ most, see `token_changes`.
    """

    compared: int
    unequal: dict[str, Pair]
    numbers: dict[str, Pair]
    updates: list[UpdateComparison]
    tokens: list[TokenChange]


def compare(logged: Mapping[str, float | None], run: Taken, command: Taken) -> Comparison:
    """Compares the step with the algorithm of the run with what the run has logged, and with that of the command."""
    both = [name for name in logged if name in run.numbers and not name.startswith(CLOCK)]
    return Comparison(
        compared=len(both),
        unequal=different({name: logged[name] for name in both}, {name: run.numbers[name] for name in both}),
        numbers=different(run.numbers, command.numbers),
        updates=compare_updates(run.record, command.record),
        tokens=token_changes(run.record, command.record),
    )


def compare_updates(run: StepRecord, command: StepRecord) -> list[UpdateComparison]:
    """The updates of a step, in order. Both records are summed over the ranks."""
    return [_compare(one, other) for one, other in zip(run.updates, command.updates, strict=True)]


def token_changes(run: StepRecord, command: StepRecord) -> list[TokenChange]:
    """The tokens whose gradients differ, the largest difference first, and at most `MOST` of them."""
    updates = list(zip(run.updates, command.updates, strict=True))
    if not updates:
        return []
    differences = torch.stack([(one.gradient - other.gradient).abs() * _differ(one, other) for one, other in updates])
    largest = differences.flatten().topk(min(MOST, int((differences > 0).sum()))).indices  # (U, R, T) as one row
    changes = []
    for number, row, position in torch.stack(torch.unravel_index(largest, differences.shape), dim=1).tolist():
        one, other = updates[number]
        values = (float(part[row, position]) for part in (one.ratio, one.gradient, other.gradient))
        changes.append(TokenChange(number + 1, row, position, *values))
    return changes


def different(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> dict[str, Pair]:
    """The numbers that differ; those of clocks are left out."""
    names = [name for name in {**one, **other} if not name.startswith(CLOCK)]
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _compare(run: UpdateRecord, command: UpdateRecord) -> UpdateComparison:
    one, other, differ = run.gradient, command.gradient, _differ(run, command)
    squared, product, own = command.products.tolist()
    length = (squared * own) ** 0.5
    return UpdateComparison(
        loss=(float(run.loss), float(command.loss)),
        grad_norm=(run.grad_norm, command.grad_norm),
        cosine=product / length if length > 0 else None,
        tokens=int((run.trained | command.trained).sum()),
        differ=int(differ.sum()),
        lost=int((differ & (other == 0)).sum()),
        gained=int((differ & (one == 0)).sum()),
        turned=int((differ & (one * other < 0)).sum()),
    )


def _differ(run: UpdateRecord, command: UpdateRecord) -> Tensor:
    """The tokens whose gradients differ by more than rounding, (R, T) bool."""
    largest = torch.maximum(run.gradient.abs().max(), command.gradient.abs().max())
    return (run.gradient - command.gradient).abs() > ROUNDING * largest
