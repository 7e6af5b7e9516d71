"""Pads rows into a batch, cuts padding that no row needs, and divides a step into mini-batches."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rft.batch.columns import kind_of, lengths
from rft.batch.media import stack_media


def collate(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Pads rows into one batch.

    Args:
        rows: one mapping a row: tensors (T_i,), numbers, nested mappings of them, and `fields` (a plain dict). All rows
            have the same columns, of the kinds in `rft/batch/columns.py`. Any row may also have `media`, a mapping of
            tensors of any shape, or None.

    Returns:
        A TensorDict of B rows; per-token columns are (B, T) with T the longest row. It has `media` if a row has.
    """
    batch = TensorDict({}, batch_size=[len(rows)])
    for name, first in rows[0].items():
        if name == "media":
            continue
        column = [row[name] for row in rows]
        if name == "fields":
            batch[name] = NonTensorStack(*[NonTensorData(fields) for fields in column])
        elif isinstance(first, Mapping):
            leaves = {leaf: _stack(name, [row[leaf] for row in column]) for leaf in first}
            batch[name] = TensorDict(leaves, batch_size=[len(rows)])
        else:
            batch[name] = _stack(name, column)
    if (media := stack_media([row.get("media") for row in rows])) is not None:
        batch["media"] = media
    return batch


def _stack(name: str, column: Sequence[Any]) -> Tensor:
    """(B,) of a column per row, (B, T) of a column per token."""
    tensors = [torch.as_tensor(value) for value in column]
    if kind_of(name, tensors[0].dim() + 1) == "row":
        return torch.stack(tensors)
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def trim(batch: TensorDict) -> TensorDict:
    """Cuts the padding that no row of the batch needs. Per-token columns become (B, max length)."""
    longest = max(int(lengths(batch).max()), 1)
    if longest == batch["response_mask"].shape[1]:
        return batch

    def cut(name: str, column: Tensor) -> Tensor:
        return column[:, :longest] if kind_of(name, column.dim()) == "token" else column

    trimmed = TensorDict({}, batch_size=batch.batch_size)
    for name in batch.keys():
        column = batch.get(name)
        if isinstance(column, Tensor):
            trimmed[name] = cut(name, column)
        elif name in ("media", "fields"):
            trimmed.set(name, column)
        else:
            leaves = {leaf: cut(name, values) for leaf, values in column.items()}
            trimmed[name] = TensorDict(leaves, batch_size=batch.batch_size)
    return trimmed


def mini_batches(unit: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Divides the units of a step into mini-batches. The result does not depend on the rank or position of a row.

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
    """A row of weight zero, which a rank computes that has fewer micro-batches than the others.

    It is the first row of the step. Its numbers that are not finite become 0, because a weight of zero does not hide
    them from the gradient.

    Args:
        batch: this rank's rows of the step; it has at least one.
        rows: those of them that are in the mini-batch, maybe none, with all columns.
    """
    row = batch[:1]
    for name, column in rows.items():
        if isinstance(column, Tensor) and (
            name not in row.keys() or name in ("loss_mask", "loss_weights", "unit_weights")
        ):
            row[name] = column.new_zeros(1, *column.shape[1:])
    for name, column in row.items():
        if isinstance(column, Tensor) and column.is_floating_point():
            row[name] = column.nan_to_num(0.0, 0.0, 0.0)
    return row
