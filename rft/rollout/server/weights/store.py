"""Weights for servers to read: one folder of safetensors files per version.

Every rank that sees the folder writes its own rows into the files; the other ranks send their rows to rank 0, which
writes them. Threads hash and write the files while the next tensors are copied. CPU memory of a rank: its rows of
2 `AHEAD` + 2 files and of one tensor, with a GPU up to twice that (pinned). Rank 0 also has the rows that it writes for
other ranks, of `AHEAD` + 1 files.

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
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rft.batch.device import to_host
from rft.distributed import SINGLE_PROCESS, World
from rft.rollout.server.weights.rows import (
    DTYPES,
    FileParts,
    FileRows,
    Outgoing,
    Rows,
    message_size,
    received,
    stored,
    write_rows,
)
from rft.rollout.server.weights.version import Adapter, StoredTensor, WeightVersion, raise_first
from rft.strategy.gather import GatherOptions, own_rows

FILE_BYTES = 2**26  # of a file at most, or those of its only tensor
AHEAD = 4  # files that a rank hashes, and that it writes, at once


class WeightStore:
    """Versions of one model's weights. All ranks have the same, and call the same methods.

    Args:
        folder: where all servers of this run can read; its content is deleted.
        model_folder: files that every version holds beside its weights, such as the config; or None.
        dtype: to which wider floating-point tensors are rounded, as a server that computes in it would; or None.
        world: of the ranks.
        deltas: a rank that does not see the folder sends only the elements that differ from those of the version that
            servers have, if these are fewer bytes. For that it keeps a copy of its rows in CPU memory.

    Attributes:
        kept: the version that servers have, on which the next one builds; None at first.
        gather_options: how `write` takes the weights of a sharded model.
    """

    def __init__(
        self,
        folder: Path,
        model_folder: Path | None,
        dtype: torch.dtype | None = None,
        world: World = SINGLE_PROCESS,
        deltas: bool = False,
    ) -> None:
        self.folder = folder
        self.kept: WeightVersion | None = None
        self._model_folder = model_folder
        self._dtype = dtype
        self._world = world
        self._written = 0  # names files, for a version may be written twice
        self._unchanged = frozenset[str]()  # tensors that were the same in the last two versions
        self.gather_options = GatherOptions(dtype, sharded=True)
        seen = self._sees_folder()
        self._writers = [rank for rank, sees in enumerate(seen) if sees]
        self._senders = [rank for rank, sees in enumerate(seen) if not sees]
        self._deltas = deltas and world.rank in self._senders
        self._sent: dict[str, Tensor] = {}  # the bytes that rank 0 has of this rank in `kept`
        self._drafted: tuple[dict[str, StoredTensor], dict[str, Tensor]] = {}, {}  # the last version, and `_sent` of it

    def _sees_folder(self) -> list[bool]:
        """For every rank whether it sees the files of rank 0, which empties the folder first."""

        def mark() -> str:
            name = uuid.uuid4().hex
            (_make_empty(self.folder) / name).mkdir()
            return name

        marked = self.folder / self._world.decide(mark)
        seen = self._world.gather(marked.exists())
        self._world.decide(marked.rmdir)
        return seen

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
        try:
            return self._write(version, tensors)
        finally:
            for _ in tensors:  # the other ranks take part in these gathers, also if this rank cannot write
                pass

    def _write(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> WeightVersion:
        world = self._world
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
        copies: dict[str, Tensor] = {}
        number = 0
        with ThreadPoolExecutor(2 * AHEAD) as pool:
            for rows, outgoing in self._hashed(pool, tensors):
                number += 1  # `enumerate` would keep the rows
                file = f"model-{self._written}-{number:05d}.safetensors"
                ranks = world.gather(outgoing.parts)
                whole = {name: stored(file, name, own, ranks) for name, own in rows.items()}
                same = [name for name, tensor in whole.items() if tensor.equals(before.get(name))]
                unchanged.update(same)
                if self._deltas:
                    copies |= {name: self._sent[name] if name in same else own.data for name, own in rows.items()}
                old = before[same[0]].file if same else ""
                if len(same) == len(whole) and files[old] == same:
                    links.append(old)
                    found |= {name: before[name] for name in same}
                    continue
                found |= whole
                try:
                    parts = [rows, *self._received(rows, outgoing, ranks)]
                except OSError as error:
                    failures.append(error)
                    continue
                if world.rank in self._writers:
                    writing.append(pool.submit(write_rows, draft / file, parts, world.rank == 0))
                del rows, outgoing, parts
                if len(writing) == AHEAD:
                    failures.append(_failure(writing.popleft()))
            failures += map(_failure, writing)
        raise_first([failure for each in world.gather(failures) for failure in each])
        weights = WeightVersion(version, draft, found, self._dtype)
        world.decide(lambda: self._complete(weights, links))
        writers = self._writers
        damage = weights.damage(writers.index(world.rank), len(writers)) if world.rank in writers else None
        raise_first(world.gather(damage))
        self._unchanged, self._drafted = frozenset(unchanged), (found, copies)
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

    def _received(self, rows: FileRows, outgoing: Outgoing, ranks: list[FileParts]) -> list[FileRows]:
        """The rows of a file that the ranks without the folder have, on rank 0. Raises an OSError there if the version
        before cannot be read."""
        world, senders = self._world, self._senders
        if not senders:
            return []
        sizes = [message_size(rows, parts) if rank in senders else 0 for rank, parts in enumerate(ranks)]
        message = outgoing.message(rows) if world.rank in senders else torch.empty(0, dtype=torch.uint8)
        messages = world.gather_bytes(message, sizes)
        return [received(messages[rank], rows, ranks, rank, self.kept) for rank in senders if world.rank == 0]

    def _hashed(
        self, pool: ThreadPoolExecutor, tensors: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[FileRows, Outgoing]]:
        """This rank's rows of the tensors of a file, and what is in them."""
        running: deque[tuple[FileRows, Future[Outgoing]]] = deque()
        for rows in self._files(tensors):
            running.append((rows, pool.submit(Outgoing.of, rows, self._sent)))
            del rows
            if len(running) == AHEAD:
                yield running[0][0], running.popleft()[1].result()
        while running:
            yield running[0][0], running.popleft()[1].result()

    def _files(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[FileRows]:
        """This rank's rows by the files that they belong to: of `FILE_BYTES` bytes at most, or of one tensor.

        Tensors that have not changed lately are apart from the others. On all ranks the files are the same.
        """
        open_: dict[bool, FileRows] = {True: {}, False: {}}
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

    def _own_rows(self, name: str, tensor: Tensor) -> Rows:
        """A copy in CPU memory, in the dtype for the servers. Raises ValueError for a dtype that they do not read."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: servers do not read weights of {tensor.dtype}; choose another rollout")
        rows, first = own_rows(tensor.detach(), self._world.rank)
        if self._dtype is not None and rows.is_floating_point() and rows.itemsize > self._dtype.itemsize:
            rows = rows.to(self._dtype)
        shape = list(tensor.shape)
        copy = to_host(rows, pinned=not self._deltas).reshape(-1)
        start = first * torch.Size(shape[1:]).numel() * rows.itemsize
        return Rows(rows.dtype, shape, start, copy.view(torch.uint8))

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
        if weights.tensors is self._drafted[0]:
            self._sent = self._drafted[1]
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


def _failure(writing: Future[None]) -> OSError | None:
    """Why a file was not written, or None. Waits for it."""
    error = writing.exception()
    if error is not None and not isinstance(error, OSError):
        raise error
    return error
