"""The rows of tensors that a rank contributes to a version, and the files that the ranks write together.

A rank that does not see the folder sends its rows to rank 0: the whole, or the elements that differ from the version
that servers have.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.rollout.server.remote.rft_receiver import CHECKSUM, WHOLE, About, pack, room, unpack
from rft.rollout.server.weights.deltas import changed_elements, sparse_delta
from rft.rollout.server.weights.version import METADATA, StoredTensor, WeightVersion, digest_of, joined

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # the names in files


@dataclass(frozen=True)
class Rows:
    """A rank's rows of a tensor.

    Attributes:
        dtype, shape: of the whole tensor, as it is written.
        first: the place of the rows among the bytes of the tensor.
        data: the bytes of the rows (n,), in CPU memory.
    """

    dtype: torch.dtype
    shape: list[int]
    first: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Part:
    """What all ranks know of a rank's rows of a tensor.

    Attributes:
        nbytes, digest: of the rows; see `StoredTensor`.
        changed: the number of elements that the rank sends to rank 0; `WHOLE`: all of them.
    """

    nbytes: int
    digest: str
    changed: int = WHOLE


FileRows = dict[str, Rows]  # a rank's rows of the tensors of a file
FileParts = dict[str, Part]


def stored(file: str, name: str, rows: Rows, ranks: list[FileParts]) -> StoredTensor:
    """A tensor in a file, from what all ranks have of it."""
    parts = [parts[name] for parts in ranks]
    filled = [part for part in parts if part.nbytes] or parts[:1]
    digest = joined([part.digest for part in filled])
    return StoredTensor(file, rows.dtype, rows.shape, [part.nbytes for part in filled], digest)


@dataclass(frozen=True)
class Outgoing:
    """A rank's rows of the tensors of a file, as it sends them to rank 0.

    Attributes:
        parts: what all ranks know of them.
        tensors: of each tensor all elements (n,), or positions and values of those that have changed.
    """

    parts: FileParts
    tensors: list[tuple[Tensor, ...]]

    @classmethod
    def of(cls, rows: FileRows, before: dict[str, Tensor]) -> "Outgoing":
        """Compares rows with the bytes that this rank sent before, by name; nothing: all of them are sent."""
        parts, tensors = {}, []
        for name, own in rows.items():
            new, old = own.data.view(own.dtype), before.get(name)
            comparable = old is not None and len(old) == len(own.data)
            tensors.append(sparse_delta(new, before[name].view(own.dtype)) if comparable else (new,))
            parts[name] = Part(len(own.data), digest_of(own.data), changed_elements(tensors[-1]))
        return cls(parts, tensors)

    def message(self, rows: FileRows) -> Tensor:
        """The bytes (n,) uint8 for rank 0."""
        about, changed = _about(rows, self.parts)
        empty = torch.empty(message_size(rows, self.parts), dtype=torch.uint8)
        return pack(about, changed, self.tensors, empty)


def message_size(rows: FileRows, parts: FileParts) -> int:
    """The bytes of `Outgoing.message`.

    Args:
        rows: of any rank.
        parts: of the rank that sends it.
    """
    return room(*_about(rows, parts))[1] - CHECKSUM  # the digests of the rows are compared in the file


def received(
    message: Tensor, rows: FileRows, ranks: list[FileParts], sender: int, kept: WeightVersion | None
) -> FileRows:
    """The rows in a message of another rank.

    Args:
        rows: of rank 0.
        ranks: what all ranks know, by rank.
        sender: the rank of the message.
        kept: the version to whose elements the changed ones are different.

    Raises:
        OSError: a file of that version cannot be read; names it.
    """
    copies, starts = {}, {}
    for name, part in ranks[sender].items():
        starts[name] = sum(parts[name].nbytes for parts in ranks[:sender])
        if part.changed != WHOLE:
            assert kept is not None
            row = rows[name].nbytes // rows[name].shape[0]  # bytes
            before = kept.read(name, slice(starts[name] // row, (starts[name] + part.nbytes) // row))
            copies[name] = before.reshape(-1)
    about, changed = _about(rows, ranks[sender])
    return {
        name: replace(rows[name], first=starts[name], data=tensor.view(torch.uint8))
        for name, tensor in unpack(about, changed, message, copies)
    }


def _about(rows: FileRows, parts: FileParts) -> tuple[About, list[int]]:
    about = [
        (name, str(rows[name].dtype).removeprefix("torch."), [part.nbytes // rows[name].dtype.itemsize])
        for name, part in parts.items()
    ]
    return about, [part.changed for part in parts.values()]


def write_rows(path: Path, ranks: list[FileRows], first: bool) -> None:
    """Writes rows into a file that several processes write together.

    Args:
        ranks: the rows of every rank for which this process writes.
        first: whether it also writes the header.

    Raises:
        OSError: the disk fails; names the file.
    """
    header, starts, size = _layout(ranks[0])
    try:
        with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)) as file:
            file.truncate(size)
            if first:
                file.write(header)
            for name, own in (item for rows in ranks for item in rows.items()):
                file.seek(starts[name] + own.first)
                file.write(own.data.numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"{path}: {error}") from error


def _layout(rows: FileRows) -> tuple[bytes, dict[str, int], int]:
    """The header of a safetensors file, the place of each tensor in the file, and the size of the file."""
    entries: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name, own in sorted(rows.items(), key=lambda item: -item[1].dtype.itemsize):  # so that all are aligned
        entries[name] = {"dtype": DTYPES[own.dtype], "shape": own.shape, "data_offsets": [end, end + own.nbytes]}
        end += own.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entries[name]["data_offsets"][0] for name in rows}, len(header) + end
