"""Weights for servers to read: a folder of safetensors files a version, which holds one tensor at a time in memory.

Tensors that are as they were in the version before are not written again: their file is hard-linked, once they have one
of their own. So parts of the model that do not train are written when they come first, and nothing has to say which.
Adapters that servers apply by themselves are a folder of their own, beside that of the weights.
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEAD = 2**18  # bytes in front of the data of a file; its header is written last, and padded with spaces
METADATA = {"format": "pt"}
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: the file's name, the entry in its header, and the SHA-256 of the bytes."""

    file: str
    entry: dict[str, Any]
    digest: str

    def holds(self, dtype: str, shape: list[int], digest: str | None) -> bool:
        """Whether it is this tensor."""
        return (self.entry["dtype"], self.entry["shape"], self.digest) == (dtype, shape, digest)


@dataclass(frozen=True)
class Adapter:
    """Adapters in a folder as peft reads it, whose name is theirs, and the SHA-256 of its files by their names."""

    folder: Path
    digests: dict[str, str]


@dataclass(frozen=True, eq=False)
class WeightVersion:
    """A version that has been written.

    Attributes:
        version: its number.
        folder, tensors: where its tensors are, by name. Versions that differ by their adapters share both.
        dtype: that servers must compute in, None where it is all the same.
        adapter: that is applied to them.
    """

    version: int
    folder: Path
    tensors: dict[str, Stored]
    dtype: torch.dtype | None
    adapter: Adapter | None = None

    def verify(self) -> None:
        """Reads everything back.

        Raises:
            OSError: a file is not what was written; names it.
        """
        for file, names in self.files().items():
            entries = {name: self.tensors[name].entry for name in names}
            whole = _header(self.folder / file) == entries
            if not whole or any(_digest(self.read(name)) != self.tensors[name].digest for name in names):
                raise OSError(
                    f"{self.folder / file} does not hold the weights of version {self.version} that were written to "
                    "it; look at the disk"
                )
        for name, digest in self.adapter.digests.items() if self.adapter is not None else ():
            assert self.adapter is not None
            if _digest((self.adapter.folder / name).read_bytes()) != digest:
                raise OSError(f"{self.adapter.folder / name} is not what was written to it; look at the disk")

    def holds(self, other: "WeightVersion") -> bool:
        """Whether whoever has these has the tensors of the other."""
        return self.tensors is other.tensors

    def read(self, name: str) -> bytes:
        """The bytes of a tensor."""
        start, end = self.tensors[name].entry["data_offsets"]
        with (self.folder / self.tensors[name].file).open("rb") as data:
            data.seek(HEAD + start)
            return data.read(end - start)

    def files(self) -> dict[str, list[str]]:
        """The names of the tensors of each file."""
        names = defaultdict(list)
        for name, stored in self.tensors.items():
            names[stored.file].append(name)
        return dict(names)


class WeightStore:
    """Versions of one model's weights.

    Args:
        folder: where all of this run's servers can read; what is in it is deleted.
        skeleton: a folder of files that every version holds beside its weights, or None.
        dtype: that floating-point tensors of more bytes are rounded to, as a server that computes in it would; or None.
    """

    def __init__(self, folder: Path, skeleton: Path | None, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        self.skeleton = skeleton
        self.dtype = dtype
        self.kept: WeightVersion | None = None
        self._written = 0  # names files, for a version may come twice
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightVersion:
        """Writes a version and reads it back.

        Args:
            version: of the tensors.
            tensors: each is let go before the next one is taken.

        Raises:
            OSError: the disk; names the file.
            ValueError: a tensor of a type that is not written; names it.
        """
        folder, draft = self.folder / f"v{version}", self.folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        before = self.kept.tensors if self.kept is not None else {}
        self._written += 1
        files = _Files(draft, str(self._written))
        found: dict[str, Stored] = {}
        still = defaultdict(list)
        for name, tensor in tensors:
            if self.dtype is not None and tensor.is_floating_point() and tensor.itemsize > self.dtype.itemsize:
                tensor = tensor.to(self.dtype)
            if tensor.dtype not in TYPES:
                raise ValueError(
                    f"{name}: weights of {tensor.dtype} are not written for servers; choose another rollout"
                )
            dtype, shape, octets = TYPES[tensor.dtype], list(tensor.shape), _octets(tensor)
            digest = _digest(octets)
            if name in before and before[name].holds(dtype, shape, digest):
                still[before[name].file].append(name)
            else:
                found[name] = files.add(name, dtype, shape, digest, octets)
            del tensor, octets  # before the next one is gathered
        files.close()
        files = _Files(draft, f"{self._written}-still")
        for file, names in still.items():
            assert self.kept is not None
            if len(names) == len(self.kept.files()[file]):
                os.link(self.kept.folder / file, draft / file)
                found |= {name: before[name] for name in names}
                continue
            for name in names:
                entry, digest = before[name].entry, before[name].digest
                found[name] = files.add(name, entry["dtype"], entry["shape"], digest, self.kept.read(name))
        files.close()
        for path in self.skeleton.iterdir() if self.skeleton is not None else ():
            os.link(path, draft / path.name)
        index = {
            "metadata": {"version": version, "sha256": {name: stored.digest for name, stored in found.items()}},
            "weight_map": {name: stored.file for name, stored in found.items()},
        }
        (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        WeightVersion(version, draft, found, self.dtype).verify()
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        return WeightVersion(version, folder, found, self.dtype)

    def adapt(self, weights: WeightVersion, version: int, name: str, save: Callable[[Path], None]) -> WeightVersion:
        """A version of the tensors of another one, none of which is written or read, and adapters.

        Args:
            name: of the adapters, which none have had.
            save: writes them to a folder.

        Raises:
            OSError: the disk; names the file.
        """
        folder = self.folder / name
        save(folder)
        adapter = Adapter(folder, {path.name: _digest(path.read_bytes()) for path in folder.iterdir()})
        return replace(weights, version=version, adapter=adapter)

    def keep(self, weights: WeightVersion) -> None:
        """Deletes all other versions; the next one is written as what differs from this one."""
        self.kept = weights
        kept = {weights.folder, weights.adapter and weights.adapter.folder}
        for path in self.folder.iterdir():
            if path not in kept:
                shutil.rmtree(path)


class _Files:
    """Safetensors files of one version, each of one type, so that all data is aligned."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._count = 0
        self._open: dict[str, _File] = {}

    def add(self, name: str, dtype: str, shape: list[int], digest: str, data: bytes | memoryview) -> Stored:
        file = self._open.get(dtype)
        if file is None or not file.has_room(name):
            if file is not None:
                file.close()
            self._count += 1
            file = self._open[dtype] = _File(self._folder / f"model-{self._name}-{self._count:05d}.safetensors")
        return Stored(file.path.name, file.add(name, dtype, shape, data), digest)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


class _File:
    """One safetensors file: first the data, behind the room for its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Any] = {"__metadata__": METADATA}
        self._room = HEAD - 100
        self._end = 0
        self._file = path.open("wb")
        self._file.seek(HEAD)

    def has_room(self, name: str) -> bool:
        return self._room > 4 * len(name) + 200  # a name that is not ASCII is escaped

    def add(self, name: str, dtype: str, shape: list[int], data: bytes | memoryview) -> dict[str, Any]:
        size = self._file.write(data)
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [self._end, self._end + size]}
        self._entries[name] = entry
        self._end += size
        self._room -= len(json.dumps({name: entry}))
        return entry

    def close(self) -> None:
        self._file.seek(0)
        header = json.dumps(self._entries).encode().ljust(HEAD - 8)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _header(path: Path) -> dict[str, Any]:
    """The entries in the header of a file, or what else is there."""
    with path.open("rb") as file:
        size, text = file.read(8), file.read(HEAD - 8)
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    metadata = found.pop("__metadata__", None)
    return found if (int.from_bytes(size, "little"), metadata) == (HEAD - 8, METADATA) else {}


def _octets(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, which are a copy only where it is not contiguous or not on the CPU."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
