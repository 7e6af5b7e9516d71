"""Rows to a batch: padding happens here and nowhere else; padding that no row needs is cut; mini-batches are dealt."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rft.batch.columns import lengths


def collate(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Pads rows into one batch.

    Args:
        rows: one mapping a row: tensors (T_i,), numbers, nested mappings of tensors, and `fields` (a plain dict).

    Returns:
        A TensorDict of B rows; per-token columns are (B, T) with T the longest row.
    """
    batch = TensorDict({}, batch_size=[len(rows)])
    for name, first in rows[0].items():
        column = [row[name] for row in rows]
        if name == "fields":
            batch[name] = NonTensorStack(*[NonTensorData(fields) for fields in column])
        elif isinstance(first, Mapping):
            batch[name] = TensorDict({k: _pad([row[k] for row in column]) for k in first}, batch_size=[len(rows)])
        else:
            batch[name] = _pad(column)
    return batch


def _pad(column: Sequence[Any]) -> Tensor:
    tensors = [torch.as_tensor(value) for value in column]
    if tensors[0].dim() == 0:
        return torch.stack(tensors)
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def trim(batch: TensorDict) -> TensorDict:
    """Cuts the padding that no row of the batch needs. Per-token columns become (B, max length)."""
    longest = max(int(lengths(batch).max()), 1)
    width = batch["response_mask"].shape[1]
    if longest == width:
        return batch

    def cut(column: Tensor) -> Tensor:
        return column[:, :longest] if column.dim() > 1 else column

    trimmed = TensorDict({}, batch_size=batch.batch_size)
    for name in batch.keys():
        column = batch.get(name)
        if isinstance(column, Tensor):
            trimmed[name] = cut(column)
        elif isinstance(column, TensorDict):
            trimmed[name] = TensorDict({k: cut(v) for k, v in column.items()}, batch_size=batch.batch_size)
        else:
            trimmed.set(name, column)
    return trimmed


def mini_batches(unit: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Deals the units of a step to mini-batches, the same way whatever rank or row position holds them.

    Args:
        unit: (N,) unit ids of every row of the step, over all ranks.
        count: number of mini-batches.
        seed: changes the permutation.

    Yields:
        `count` times the unit ids of a mini-batch, sorted.
    """
    ids = torch.unique(unit)
    order = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    for part in order.tensor_split(count):
        yield part.sort().values


def dummy_row(batch: TensorDict, rows: TensorDict) -> TensorDict:
    """A row of weight zero, for a rank that has nothing left to do while others still work.

    Args:
        batch: this rank's rows of the step; it has at least one.
        rows: those of them that are in the mini-batch, maybe none, with all columns.
    """
    row = batch[:1].clone()
    for name, column in rows.items():
        if isinstance(column, Tensor) and (name not in row.keys() or name in ("keep", "loss_weights", "unit_weights")):
            row[name] = column.new_zeros(1, *column.shape[1:])
    return row
