"""Weights for servers to read: one folder of safetensors files per version.

Where all ranks can write to the folder, every rank writes its own rows into the files, and nothing is gathered; else
rank 0 gathers and writes. Threads hash and write the files while the next tensors are copied. CPU memory of a rank: its
rows of 2 `AHEAD` + 2 files and of one tensor.

A file whose tensors are equal to those of the version before is hard-linked. Tensors that have not changed are in files
of their own from the next version on. So a frozen part is written twice, and no caller has to say which part that is.
Adapters that servers apply themselves have a folder beside the weights.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.distributed import SINGLE_PROCESS, World
from rft.rollout.server.weights.version import (
    METADATA,
    Adapter,
    StoredTensor,
    WeightVersion,
    digest_of,
    joined,
    raise_first,
)
from rft.strategy.gather import GatherOptions, own_rows

FILE_BYTES = 2**26  # of a file at most, or those of its only tensor
AHEAD = 4  # files that a rank hashes, and that it writes, at once
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
class _Rows:
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

    def stored(self, file: str, parts: list[tuple[int, str]]) -> StoredTensor:
        """The tensor in a file, from the lengths and digests of the rows of all ranks."""
        filled = [part for part in parts if part[0]] or parts[:1]
        lengths, digests = zip(*filled, strict=True)
        return StoredTensor(file, self.dtype, self.shape, [*lengths], joined([*digests]))


_File = dict[str, _Rows]  # a rank's rows of the tensors of a file
_Parts = dict[str, tuple[int, str]]  # their lengths and digests


class WeightStore:
    """Versions of one model's weights. All ranks have the same, and call the same methods.

    Args:
        folder: where all servers of this run can read; its content is deleted.
        model_folder: files that every version holds beside its weights, such as the config; or None.
        dtype: to which wider floating-point tensors are rounded, as a server that computes in it would; or None.
        world: of the ranks.

    Attributes:
        kept: the version that servers have, on which the next one builds; None at first.
        gather_options: how `write` takes the weights of a sharded model.
    """

    def __init__(
        self, folder: Path, model_folder: Path | None, dtype: torch.dtype | None = None, world: World = SINGLE_PROCESS
    ) -> None:
        self.folder = folder
        self.kept: WeightVersion | None = None
        self._model_folder = model_folder
        self._dtype = dtype
        self._world = world
        self._written = 0  # names files, for a version may be written twice
        self._unchanged = frozenset[str]()  # tensors that were the same in the last two versions
        self._shared = self._shares_folder()
        self.gather_options = GatherOptions(dtype, rank_zero_only=not self._shared, sharded=self._shared)

    def _shares_folder(self) -> bool:
        """Whether all ranks see the files of rank 0, which empties the folder first."""

        def mark() -> str:
            name = uuid.uuid4().hex
            (_make_empty(self.folder) / name).mkdir()
            return name

        marked = self.folder / self._world.decide(mark)
        shared = all(self._world.gather(marked.exists()))
        self._world.decide(marked.rmdir)
        return shared

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightVersion:
        """Writes a version and reads it back; then its folder appears. A collective.

        Args:
            version: of the tensors.
            tensors: gathered by `gather_options`. Each is copied, and released before the next one is taken.

        Raises:
            OSError: the disk fails on a rank; names the file. Raised on every rank.
            ValueError: a tensor has an unsupported dtype; names it. Raised on every rank.
        """
        tensors = iter(tensors)

        def write(world: World) -> WeightVersion:
            try:
                return self._write(version, tensors, world)
            finally:
                for _ in tensors:  # the other ranks take part in these gathers, also if this rank cannot write
                    pass

        if self._shared:
            return write(self._world)
        if self._world.rank > 0:
            for _ in tensors:
                pass
        written: WeightVersion = self._world.decide(lambda: write(SINGLE_PROCESS))
        return written

    def _write(self, version: int, tensors: Iterator[tuple[str, Tensor]], world: World) -> WeightVersion:
        """Writes a version together with the other ranks of a world."""
        draft = self.folder / "draft"
        world.decide(lambda: _make_empty(draft))
        self._written += 1
        before = {} if self.kept is None else self.kept.tensors
        files = {} if self.kept is None else self.kept.files()
        found: dict[str, StoredTensor] = {}
        unchanged: set[str] = set()
        links: list[str] = []
        writing: deque[Future[None]] = deque()
        failures: list[OSError | None] = []
        number = 0
        with ThreadPoolExecutor(2 * AHEAD) as pool:
            for rows, digests in self._hashed(pool, tensors):
                number += 1  # `enumerate` would keep the rows
                file = f"model-{self._written}-{number:05d}.safetensors"
                ranks = world.gather(digests)
                stored = {name: own.stored(file, [parts[name] for parts in ranks]) for name, own in rows.items()}
                same = [name for name in stored if name in before and before[name].equals(stored[name])]
                unchanged.update(same)
                old = before[same[0]].file if same else ""
                if len(same) == len(stored) and files[old] == same:
                    links.append(old)
                    found |= {name: before[name] for name in same}
                    continue
                found |= stored
                writing.append(pool.submit(_write_rows, draft / file, rows, world.rank == 0))
                del rows
                if len(writing) == AHEAD:
                    failures.append(_failure(writing.popleft()))
            failures += map(_failure, writing)
        raise_first([failure for each in world.gather(failures) for failure in each])
        weights = WeightVersion(version, draft, found, self._dtype)
        world.decide(lambda: self._complete(weights, links))
        raise_first(world.gather(weights.damage(world.rank, world.size)))
        self._unchanged = frozenset(unchanged)
        folder: Path = world.decide(lambda: _replace(draft, self.folder / f"v{version}"))
        return replace(weights, folder=folder)

    def _complete(self, weights: WeightVersion, links: list[str]) -> None:
        """Adds what is not new to the folder of a version, and its index."""
        for file in links:
            assert self.kept is not None
            os.link(self.kept.folder / file, weights.folder / file)
        for path in self._model_folder.iterdir() if self._model_folder is not None else ():
            os.link(path, weights.folder / path.name)
        index = {
            "metadata": {"version": weights.version},
            "weight_map": {name: stored.file for name, stored in weights.tensors.items()},
        }
        (weights.folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def _hashed(
        self, pool: ThreadPoolExecutor, tensors: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[_File, _Parts]]:
        """This rank's rows of the tensors of a file, and what is in them."""
        running: deque[tuple[_File, Future[_Parts]]] = deque()
        for rows in self._files(tensors):
            running.append((rows, pool.submit(_parts, rows)))
            del rows
            if len(running) == AHEAD:
                yield running[0][0], running.popleft()[1].result()
        while running:
            yield running[0][0], running.popleft()[1].result()

    def _files(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[_File]:
        """This rank's rows by the files that they belong to: of `FILE_BYTES` bytes at most, or of one tensor.

        Tensors that have not changed lately are apart from the others. On all ranks the files are the same.
        """
        open_: dict[bool, _File] = {True: {}, False: {}}
        for name, tensor in tensors:
            own = self._own_rows(name, tensor)
            del tensor  # before the next one is gathered
            still = name in self._unchanged
            if open_[still] and own.nbytes + sum(rows.nbytes for rows in open_[still].values()) > FILE_BYTES:
                yield open_[still]
                open_[still] = {}
            open_[still][name] = own
            del own
        yield from filter(None, open_.values())

    def _own_rows(self, name: str, tensor: Tensor) -> _Rows:
        """A copy in CPU memory, in the dtype for the servers. Raises ValueError for a dtype that they do not read."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: servers do not read weights of {tensor.dtype}; choose another rollout")
        rows, first = own_rows(tensor.detach(), self._world.rank)
        if self._dtype is not None and rows.is_floating_point() and rows.itemsize > self._dtype.itemsize:
            rows = rows.to(self._dtype)
        shape = list(tensor.shape)
        copy = rows.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1)
        start = first * torch.Size(shape[1:]).numel() * rows.itemsize
        return _Rows(rows.dtype, shape, start, copy.view(torch.uint8))

    def adapt(self, weights: WeightVersion, version: int, name: str, save: Callable[[Path], None]) -> WeightVersion:
        """A version that applies adapters to the tensors of another one; only the adapters are written. A collective.

        Args:
            name: of the adapters; no adapters have had it before.
            save: writes them to a folder.

        Raises:
            OSError: the disk fails; names the file.
        """

        def write() -> Adapter:
            folder = self.folder / name
            save(folder)
            digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
            return Adapter(folder, digests)

        return replace(weights, version=version, adapter=self._world.decide(write))

    def keep(self, weights: WeightVersion) -> None:
        """Deletes all other versions; the next version is written as the difference to this one. A collective."""
        self.kept = weights
        kept = {weights.folder, weights.adapter and weights.adapter.folder}
        for path in self.folder.iterdir() if self._world.rank == 0 else ():
            if path not in kept:
                shutil.rmtree(path)


def _make_empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _replace(folder: Path, other: Path) -> Path:
    """Renames a folder to the name of another one, which is deleted."""
    shutil.rmtree(other, ignore_errors=True)
    return folder.rename(other)


def _parts(rows: _File) -> _Parts:
    return {name: (own.data.nbytes, digest_of(own.data)) for name, own in rows.items()}


def _write_rows(path: Path, rows: _File, first: bool) -> None:
    """Writes a rank's rows into a file that the ranks write together, and the header on the first rank.

    Raises:
        OSError: the disk fails; names the file.
    """
    header, starts, size = _layout(rows)
    try:
        with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)) as file:
            file.truncate(size)
            if first:
                file.write(header)
            for name, own in rows.items():
                file.seek(starts[name] + own.first)
                file.write(own.data.numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"{path}: {error}") from error


def _layout(rows: _File) -> tuple[bytes, dict[str, int], int]:
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


def _failure(writing: Future[None]) -> OSError | None:
    """Why a file was not written, or None. Waits for it."""
    error = writing.exception()
    if error is not None and not isinstance(error, OSError):
        raise error
    return error
