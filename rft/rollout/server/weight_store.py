"""Weights for servers to read: one folder of safetensors files per version, written bucket by bucket.

CPU memory of rank 0: one bucket, which the safetensors library may copy once more, and one tensor. On the device of the
model it is one tensor. A tensor that is equal to the one of the version before is not written again: its file is
hard-linked once it holds unchanged tensors only. So the frozen part of a model is written when it first appears, and
no caller has to say which part that is. Adapters that servers apply themselves have a folder beside the weights.
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

BUCKET = 2**28  # bytes of a file, or those of its only tensor
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
        for file in self.files():
            if not self._intact(file):
                raise OSError(
                    f"{self.folder / file} does not hold the weights of version {self.version} that were written to "
                    "it; check the disk"
                )
        for name, digest in self.adapter.digests.items() if self.adapter is not None else ():
            assert self.adapter is not None
            if _digest((self.adapter.folder / name).read_bytes()) != digest:
                raise OSError(f"{self.adapter.folder / name} is not what was written to it; check the disk")

    def _intact(self, file: str) -> bool:
        try:
            with safe_open(self.folder / file, "pt") as opened:
                if set(opened.keys()) != set(self.files()[file]) or opened.metadata() != METADATA:
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
        changed = _BucketWriter(draft, str(self._written))
        unchanged = defaultdict(list)
        for name, tensor in tensors:
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name}: servers do not read weights of {tensor.dtype}; choose another rollout")
            if self._dtype is not None and tensor.is_floating_point() and tensor.itemsize > self._dtype.itemsize:
                tensor = tensor.to(self._dtype)
            copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            del tensor  # before the next one is gathered
            digest = _digest(_bytes(copy))
            if name in before and before[name].equals(copy.dtype, list(copy.shape), digest):
                unchanged[before[name].file].append(name)
            else:
                changed.add(name, copy, digest)
            del copy
        changed.flush()
        found = changed.stored | self._carry_over(draft, unchanged)
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

    def _carry_over(self, draft: Path, unchanged: dict[str, list[str]]) -> dict[str, StoredTensor]:
        """Links files of which no tensor has changed, and copies the unchanged tensors of the others to new files.

        Args:
            unchanged: names of unchanged tensors by the file of the kept version that holds them.
        """
        linked: dict[str, StoredTensor] = {}
        copied = _BucketWriter(draft, f"{self._written}-unchanged")
        for file, names in unchanged.items():
            assert self.kept is not None
            if len(names) == len(self.kept.files()[file]):
                os.link(self.kept.folder / file, draft / file)
                linked |= {name: self.kept.tensors[name] for name in names}
                continue
            for name in names:
                copied.add(name, self.kept.read(name), self.kept.tensors[name].digest)
        copied.flush()
        return linked | copied.stored

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


class _BucketWriter:
    """Collects tensors and writes a safetensors file whenever they would exceed `BUCKET` bytes.

    Attributes:
        stored: the tensors that are in files.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.stored: dict[str, StoredTensor] = {}
        self._folder = folder
        self._name = name
        self._count = 0
        self._size = 0  # bytes in the bucket
        self._bucket: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor, digest: str) -> None:
        """Takes a contiguous CPU tensor that shares its memory with no other one."""
        if self._size + tensor.nbytes > BUCKET:
            self.flush()
        self._size += tensor.nbytes
        self._bucket[name], self._digests[name] = tensor, digest

    def flush(self) -> None:
        """Writes the collected tensors and releases them."""
        if not self._bucket:
            return
        self._count += 1
        path = self._folder / f"model-{self._name}-{self._count:05d}.safetensors"
        try:
            save_file(self._bucket, path, METADATA)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        for name, tensor in self._bucket.items():
            self.stored[name] = StoredTensor(path.name, tensor.dtype, list(tensor.shape), self._digests[name])
        self._size, self._bucket, self._digests = 0, {}, {}


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
