"""Weights for servers to read: one folder of safetensors files per version, written bucket by bucket.

Threads hash and write buckets while the next ones are gathered. CPU memory of rank 0: `WRITERS` buckets and one tensor.
On the device of the model it is one tensor. A tensor that is equal to the one of the version before is not written
again: its file is hard-linked once it holds unchanged tensors only. So the frozen part of a model is written when it
first appears, and no caller has to say which part that is. Adapters that servers apply themselves have a folder beside
the weights.
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

BUCKET = 2**26  # bytes of a file, or those of its only tensor
WRITERS = 4  # threads that hash, write and read back files
METADATA = {"format": "pt"}
DTYPES = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: the name of the file.
        dtype, shape: of the tensor.
        digest: the SHA-256 of its bytes.
    """

    file: str
    dtype: torch.dtype
    shape: list[int]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def equals(self, dtype: torch.dtype, shape: list[int], digest: str | None) -> bool:
        """True for a tensor of this dtype, shape and content."""
        return (self.dtype, self.shape, self.digest) == (dtype, shape, digest)


@dataclass(frozen=True)
class Adapter:
    """Adapters in a folder in peft's format; the name of the folder is the name of the adapters.

    Attributes:
        folder: of the files.
        digests: the SHA-256 of each file by its name.
    """

    folder: Path
    digests: dict[str, str]


@dataclass(frozen=True, eq=False)
class WeightVersion:
    """A version that has been written.

    Attributes:
        version: its number.
        folder, tensors: where its tensors are, by name. Versions that differ in their adapters share both.
        dtype: in which servers must compute; None where any will do.
        adapter: applied to the tensors.
    """

    version: int
    folder: Path
    tensors: dict[str, StoredTensor]
    dtype: torch.dtype | None
    adapter: Adapter | None = None

    def verify(self) -> None:
        """Reads all files and compares them with what was written.

        Raises:
            OSError: a file differs; names it.
        """
        files = self.files()
        with ThreadPoolExecutor(WRITERS) as pool:
            for file, intact in zip(files, pool.map(self._intact, files, files.values()), strict=True):
                if not intact:
                    raise OSError(
                        f"{self.folder / file} does not hold the weights of version {self.version} that were written "
                        "to it; check the disk"
                    )
        for name, digest in self.adapter.digests.items() if self.adapter is not None else ():
            assert self.adapter is not None
            if _digest((self.adapter.folder / name).read_bytes()) != digest:
                raise OSError(f"{self.adapter.folder / name} is not what was written to it; check the disk")

    def _intact(self, file: str, names: list[str]) -> bool:
        try:
            with safe_open(self.folder / file, "pt") as opened:
                if set(opened.keys()) != set(names) or opened.metadata() != METADATA:
                    return False
                for name in opened.keys():
                    found = opened.get_tensor(name)
                    if not self.tensors[name].equals(found.dtype, list(found.shape), _digest(_bytes(found))):
                        return False
        except (SafetensorError, OSError):
            return False
        return True

    def shares_tensors(self, other: "WeightVersion") -> bool:
        """True where both differ in their adapters at most."""
        return self.tensors is other.tensors

    def read(self, name: str) -> Tensor:
        """A tensor, in memory. Raises an OSError that names the file where it cannot be read."""
        path = self.folder / self.tensors[name].file
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(name).clone()  # of the mapped file
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        return tensor

    def files(self) -> dict[str, list[str]]:
        """The names of the tensors of each file."""
        names = defaultdict(list)
        for name, stored in self.tensors.items():
            names[stored.file].append(name)
        return dict(names)


class WeightStore:
    """Versions of one model's weights.

    Args:
        folder: where all servers of this run can read; its content is deleted.
        model_folder: files that every version holds beside its weights, such as the config; or None.
        dtype: to which wider floating-point tensors are rounded, as a server that computes in it would; or None.

    Attributes:
        kept: the version that servers have, on which the next one builds; None at first.
    """

    def __init__(self, folder: Path, model_folder: Path | None, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        self.kept: WeightVersion | None = None
        self._model_folder = model_folder
        self._dtype = dtype
        self._written = 0  # names files, for a version may be written twice
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightVersion:
        """Writes a version and reads it back. The folder of the version appears when all of it is written.

        Args:
            version: of the tensors.
            tensors: each is copied, and released before the next one is taken.

        Raises:
            OSError: the disk fails; names the file.
            ValueError: a tensor has an unsupported dtype; names it.
        """
        folder, draft = self.folder / f"v{version}", self.folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        before = self.kept.tensors if self.kept is not None else {}
        self._written += 1
        found: dict[str, StoredTensor] = {}
        unchanged = defaultdict(list)
        for written in _write_buckets(draft / f"model-{self._written}", self._copies(tensors), before):
            found |= written.changed
            for name in written.unchanged:
                unchanged[before[name].file].append(name)
        found |= self._carry_over(draft, unchanged)
        for path in self._model_folder.iterdir() if self._model_folder is not None else ():
            os.link(path, draft / path.name)
        index = {
            "metadata": {"version": version, "sha256": {name: stored.digest for name, stored in found.items()}},
            "weight_map": {name: stored.file for name, stored in found.items()},
        }
        (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        WeightVersion(version, draft, found, self._dtype).verify()
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        return WeightVersion(version, folder, found, self._dtype)

    def _copies(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Contiguous copies in CPU memory, in the dtype of the servers. Raises ValueError for a dtype that they do not
        read."""
        for name, tensor in tensors:
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name}: servers do not read weights of {tensor.dtype}; choose another rollout")
            if self._dtype is not None and tensor.is_floating_point() and tensor.itemsize > self._dtype.itemsize:
                tensor = tensor.to(self._dtype)
            copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            del tensor  # before the next one is gathered
            yield name, copy
            del copy

    def _carry_over(self, draft: Path, unchanged: dict[str, list[str]]) -> dict[str, StoredTensor]:
        """Links files of which no tensor has changed, and copies the unchanged tensors of the others to new files.

        Args:
            unchanged: names of unchanged tensors by the file of the kept version that holds them.
        """
        if self.kept is None:
            return {}
        kept, files = self.kept, self.kept.files()
        carried = {name: kept.tensors[name] for names in unchanged.values() for name in names}
        copied: list[str] = []
        for file, names in unchanged.items():
            if len(names) == len(files[file]):
                os.link(kept.folder / file, draft / file)
            else:
                copied += names
        copies = ((name, kept.read(name)) for name in copied)
        for written in _write_buckets(draft / f"model-{self._written}-unchanged", copies, {}):
            # with the digests of the version before, so that `verify` finds what was damaged since
            carried |= {name: replace(carried[name], file=new.file) for name, new in written.changed.items()}
        return carried

    def adapt(self, weights: WeightVersion, version: int, name: str, save: Callable[[Path], None]) -> WeightVersion:
        """A version that applies adapters to the tensors of another one; writes the adapters alone.

        Args:
            name: of the adapters; no adapters have had it before.
            save: writes them to a folder.

        Raises:
            OSError: the disk fails; names the file.
        """
        folder = self.folder / name
        save(folder)
        adapter = Adapter(folder, {path.name: _digest(path.read_bytes()) for path in folder.iterdir()})
        return replace(weights, version=version, adapter=adapter)

    def keep(self, weights: WeightVersion) -> None:
        """Deletes all other versions; the next version is written as the difference to this one."""
        self.kept = weights
        kept = {weights.folder, weights.adapter and weights.adapter.folder}
        for path in self.folder.iterdir():
            if path not in kept:
                shutil.rmtree(path)


class _Written(NamedTuple):
    """What became of the tensors of a bucket.

    Attributes:
        changed: those that are in a new file.
        unchanged: the names of the others.
    """

    changed: dict[str, StoredTensor]
    unchanged: list[str]


def _write_buckets(
    path: Path, tensors: Iterable[tuple[str, Tensor]], before: dict[str, StoredTensor]
) -> Iterator[_Written]:
    """Writes the tensors that are not in the version before, in `WRITERS` threads, bucket by bucket.

    Args:
        path: of the files, without number and suffix.
        tensors: contiguous CPU tensors that share their memory with no others; released once they are written.
        before: the tensors of the version before.

    Raises:
        OSError: the disk fails; names the file.
    """
    running: deque[Future[_Written]] = deque()
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, bucket in enumerate(_buckets(tensors), 1):
            file = path.with_name(f"{path.name}-{number:05d}.safetensors")
            running.append(pool.submit(_write_changed, file, bucket, before))
            del bucket
            if len(running) == WRITERS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of at most `BUCKET` bytes; a larger one is alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
        del tensor
    if bucket:
        yield bucket


def _write_changed(path: Path, bucket: dict[str, Tensor], before: dict[str, StoredTensor]) -> _Written:
    """Writes those tensors of a bucket that differ from the version before, if there are any."""
    digests = {name: _digest(_bytes(tensor)) for name, tensor in bucket.items()}
    unchanged = [
        name
        for name, tensor in bucket.items()
        if name in before and before[name].equals(tensor.dtype, list(tensor.shape), digests[name])
    ]
    changed = {name: tensor for name, tensor in bucket.items() if name not in unchanged}
    if changed:
        try:
            save_file(changed, path, METADATA)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    stored = {
        name: StoredTensor(path.name, tensor.dtype, list(tensor.shape), digests[name])
        for name, tensor in changed.items()
    }
    return _Written(stored, unchanged)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
