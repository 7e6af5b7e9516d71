"""Invariances of the result of a plugin. A check takes a plugin and its kind, and is True if the invariance holds."""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from rft.algorithm.certificate.sample import (
    KEEP,
    OF_CANDIDATES,
    PARTS,
    Kind,
    Outcome,
    call_loss,
    evaluate,
    of_candidates,
    prepared,
    sample_for,
)
from rft.batch.columns import over
from rft.registry import Plugin

PERMUTATION = torch.tensor([6, 2, 4, 0, 5, 1, 3])
EXTREME = 100.0  # a log-ratio whose exp is beyond float32
NONSENSE = 1e3  # finite, as all columns of a batch are
_PADDING = 3


def well_formed(plugin: Plugin, kind: Kind) -> bool:
    """A loss has one value per unit, a token or a row, and so has every statistic, which carries no gradient."""
    rows = prepared(plugin, kind, sample_for(plugin, kind, on_policy=False))
    _, loss, statistics = call_loss(plugin, rows)
    shapes = {value.shape for value in (loss, *statistics.values())}
    return shapes == {rows["weights"].shape} and not any(number.requires_grad for number in statistics.values())


def repetition(plugin: Plugin, kind: Kind) -> bool:
    """The same rows have the same result again: the function remembers nothing, and draws from no global generator."""
    first, second = ({**each.columns, **each.sums} for each in (_outcome(plugin, kind), _outcome(plugin, kind)))
    return all(torch.equal(second[name], first[name]) for name in first)


def row_order(plugin: Plugin, kind: Kind) -> bool:
    """Rows in another order have the same columns."""
    plain, moved = _outcome(plugin, kind), _outcome(plugin, kind, lambda rows: rows[PERMUTATION])
    return _same(moved, Outcome({name: column[PERMUTATION] for name, column in plain.columns.items()}, plain.sums))


def padding(plugin: Plugin, kind: Kind) -> bool:
    """A wider batch changes nothing."""

    def widen(column: Tensor) -> Tensor:
        return pad(column, (*[0, 0] * (column.dim() - 2), 0, _PADDING)) if column.dim() > 1 else column

    plain = _outcome(plugin, kind)
    wide = _outcome(plugin, kind, lambda rows: rows.apply(widen, batch_size=rows.batch_size))
    return _same(wide, Outcome({name: widen(column) for name, column in plain.columns.items()}, plain.sums))


def micro_batches(plugin: Plugin, kind: Kind) -> bool:
    """The loss of a mini-batch is the sum of the losses of its parts."""
    rows = prepared(plugin, kind, sample_for(plugin, kind, on_policy=False))
    parts = PARTS.get(plugin.facts.unit, PARTS["row"])
    outcomes = [evaluate(plugin, kind, rows[part]) for part in parts]
    back = torch.cat(parts).argsort()
    whole = evaluate(plugin, kind, rows)
    columns = {name: torch.cat([part.columns[name] for part in outcomes])[back] for name in whole.columns}
    sums = {name: torch.stack([part.sums[name] for part in outcomes]).sum() for name in whole.sums}
    return _same(Outcome(columns, sums), whole)


def outside_keep(plugin: Plugin, kind: Kind) -> bool:
    """Nonsense in tokens that are not trained changes nothing, and they get nothing."""

    def spoil(column: Tensor) -> Tensor:
        over_tokens = column.dim() > 1 and column.is_floating_point()
        return torch.where(over(KEEP, column), column, NONSENSE) if over_tokens else column

    def spoiled(rows: TensorDict) -> TensorDict:
        kept = {name: rows[name] for name in ("weights",) if name in rows.keys()}
        return rows.apply(spoil, batch_size=rows.batch_size).update(kept)

    outcome = _outcome(plugin, kind, spoiled)
    nothing = not any(column[~KEEP].any() for column in outcome.columns.values())
    return nothing and _same(outcome, _outcome(plugin, kind))


def empty_rows(plugin: Plugin, kind: Kind) -> bool:
    """In a batch without a trained token everything is finite, and no token gets anything."""

    def emptied(rows: TensorDict) -> TensorDict:
        rows = rows.clone()
        rows["batch", "loss_mask"] = torch.zeros_like(KEEP)
        return rows

    outcome = _outcome(plugin, kind, emptied)
    return _finite(outcome) and not any(column.any() for column in outcome.columns.values())


def extreme_ratios(plugin: Plugin, kind: Kind) -> bool:
    """Log-ratios of +-100 to every other policy leave a loss and its gradient finite, in float32."""

    def far(rows: TensorDict) -> TensorDict:
        rows = rows.apply(lambda column: column.float() if column.is_floating_point() else column)
        signs = torch.tensor([1.0, -1.0]).repeat(len(KEEP))[: len(KEEP), None] * EXTREME
        for name in rows["batch"].keys():
            if name in OF_CANDIDATES:
                rows["batch", name] = of_candidates(torch.Generator().manual_seed(0), EXTREME).float()
            elif name.endswith("logprobs"):
                rows["batch", name] = rows["outputs", "logprobs"] + signs
        return rows

    return _finite(_outcome(plugin, kind, far))


CHECKS: dict[str, Callable[[Plugin, Kind], bool]] = {
    "repetition": repetition,
    "row order": row_order,
    "padding": padding,
    "outside keep": outside_keep,
    "empty rows": empty_rows,
}
LOSS_CHECKS = {"micro-batches": micro_batches, "extreme log-ratios": extreme_ratios}


def invariances(plugin: Plugin, kind: Kind) -> dict[str, bool]:
    """Every check of a kind by name; the shape or the repetition alone if that fails, as the others need both."""
    if kind == "loss" and not well_formed(plugin, kind):
        return {"shape": False}
    if not repetition(plugin, kind):
        return {"repetition": False}
    checks, shape = (CHECKS | LOSS_CHECKS, {"shape": True}) if kind == "loss" else (CHECKS, {})
    return shape | {name: check(plugin, kind) for name, check in checks.items()}


def _outcome(plugin: Plugin, kind: Kind, change: Callable[[TensorDict], TensorDict] = lambda rows: rows) -> Outcome:
    return evaluate(plugin, kind, prepared(plugin, kind, change(sample_for(plugin, kind, on_policy=False))))


def _finite(outcome: Outcome) -> bool:
    return all(bool(value.isfinite().all()) for value in (*outcome.columns.values(), *outcome.sums.values()))


def _same(found: Outcome, expected: Outcome) -> bool:
    """Equal up to the rounding of sums in another order."""
    actual, wanted = ({**outcome.columns, **outcome.sums} for outcome in (found, expected))
    return all(torch.allclose(actual[name], wanted[name], rtol=1e-10, atol=1e-12) for name in wanted)
