"""The column `media`: what a processor returned beside per-token columns, one entry a row.

An entry is a TensorDict without batch dimensions whose tensors have any shape of at least one dimension; a row without
media has an empty one. The column is a LazyStackedTensorDict of B entries. A batch in which no row has media does not
have the column. Indexing a batch keeps the entries, so rows that share an entry
still share it afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

Media = Mapping[str, Tensor]
Row = dict[str, Any]


class SharedMedia(NamedTuple):
    """The media of rows, each distinct entry once.

    Attributes:
        entries: the distinct entries.
        rows: of each row, the number of its entry; -1 for a row without media.
    """

    entries: list[dict[str, Tensor]]
    rows: list[int]


def stack_media(rows: Sequence[Media | None]) -> LazyStackedTensorDict | None:
    """The column `media` of some rows, or None where no row has media. No tensor is copied.

    Args:
        rows: tensors by the processor's names, or None. Rows that share one mapping share one entry.
    """
    if not any(rows):
        return None
    entries = {id(media): TensorDict(dict(media or {}), batch_size=[]) for media in rows}
    assert all(tensor.dim() > 0 for entry in entries.values() for tensor in entry.values()), "media cannot be 0-D"
    return LazyStackedTensorDict(*[entries[id(media)] for media in rows])


def media_entries(batch: TensorDictBase) -> list[TensorDict]:
    """The entry of every row; an empty list where the batch has no rows or no column `media`."""
    column = batch.get("media", None)
    return column.tensordicts if isinstance(column, LazyStackedTensorDict) else []


def has_media(batch: TensorDictBase) -> bool:
    """Whether any row of a batch has media."""
    return any(len(entry.keys()) > 0 for entry in media_entries(batch))


def keep_once(group: Sequence[Row]) -> list[Row]:
    """What a checkpoint keeps of rows of one prompt: those behind the first without media, and without equal fields.

    The prompt in `fields` may have media, too, as data: URLs. Rows without media are unchanged.
    """
    if not group or group[0].get("media") is None:
        return list(group)
    return [group[0], *(_beyond(row, group[0]["fields"]) for row in group[1:])]


def _beyond(row: Row, known: dict[str, Any]) -> Row:
    """A row without its media and without the fields, which JSON can hold, that equal known ones."""
    fields = {name: value for name, value in row["fields"].items() if name not in known or value != known[name]}
    return {name: value for name, value in row.items() if name != "media"} | {"fields": fields}


def share_again(group: Sequence[Row]) -> list[Row]:
    """The rows of `keep_once` with the media and the fields of the first, which they share."""
    if not group or group[0].get("media") is None:
        return list(group)
    media, known = group[0]["media"], group[0]["fields"]
    return [row | {"media": media, "fields": known | row["fields"]} for row in group]


def concat_media(entries: Iterable[Media | TensorDict]) -> dict[str, Tensor]:
    """Concatenates entries along their first dimension, each tensor over the rows that have it.

    Args:
        entries: of the rows of a micro-batch, in the order in which the forward has the rows.

    Raises:
        ValueError: tensors of one name differ in another dimension than the first.
    """
    found: dict[str, list[Tensor]] = {}
    for entry in entries:
        for name, tensor in entry.items():
            found.setdefault(name, []).append(tensor)
    for name, tensors in found.items():
        if len(shapes := {tuple(tensor.shape[1:]) for tensor in tensors}) > 1:
            raise ValueError(
                f"the rows of a micro-batch have media {name!r} of the shapes (n, ...) with ... = {sorted(shapes)}, "
                "which cannot be concatenated; set the processor's options so that they are equal"
            )
    return {name: torch.cat(tensors) for name, tensors in found.items()}


def join_media(parts: Sequence[Media]) -> Media | None:
    """The media of a text from those of its parts; None without parts. Raises as `concat_media`."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return concat_media(parts)


def share_media(batch: TensorDictBase) -> SharedMedia | None:
    """The media of a batch for another rank, or None where no row has any. No tensor is a view of a larger one."""
    if not has_media(batch):
        return None
    numbers: dict[int, int] = {}
    shared = SharedMedia([], [])
    for entry in media_entries(batch):
        if len(entry.keys()) == 0:
            shared.rows.append(-1)
            continue
        if id(entry) not in numbers:
            numbers[id(entry)] = len(shared.entries)
            shared.entries.append({name: _own_storage(tensor) for name, tensor in entry.items()})
        shared.rows.append(numbers[id(entry)])
    return shared


def _own_storage(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is a view of a larger one: a tensor is pickled with its whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
