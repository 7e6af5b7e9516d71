"""A version of a model's weights in files, and what proves that the files are as they were written."""

import hashlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

METADATA = {"format": "pt"}
READERS = 8  # files that are read at once


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: the name of the file.
        dtype, shape: of the tensor.
        parts: the number of bytes that each rank wrote, in their order.
        digest: the SHA-256 of the tensor's bytes, or of the SHA-256 of all parts, if there are several.
    """

    file: str
    dtype: torch.dtype
    shape: list[int]
    parts: list[int]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def equals(self, other: "StoredTensor | None") -> bool:
        """True for a tensor of the same dtype, shape and content."""
        return other is not None and replace(self, file=other.file) == other


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
        raise_first([self.damage()])
        for name, digest in self.adapter.digests.items() if self.adapter is not None else ():
            assert self.adapter is not None
            if hashlib.sha256((self.adapter.folder / name).read_bytes()).hexdigest() != digest:
                raise OSError(f"{self.adapter.folder / name} is not what was written to it; check the disk")

    def damage(self, rank: int = 0, ranks: int = 1) -> OSError | None:
        """Reads the files of tensors, or a rank's share of them; the error of one that is not as it was written."""
        files = dict([*self.files().items()][rank::ranks])
        with ThreadPoolExecutor(READERS) as pool:
            for file, intact in zip(files, pool.map(self._intact, files, files.values()), strict=True):
                if not intact:
                    return OSError(
                        f"{self.folder / file} does not hold the weights of version {self.version} that were written "
                        "to it; check the disk"
                    )
        return None

    def _intact(self, file: str, names: list[str]) -> bool:
        try:
            with safe_open(self.folder / file, "pt") as opened:
                if set(opened.keys()) != set(names) or opened.metadata() != METADATA:
                    return False
                for name in opened.keys():
                    stored, tensor = self.tensors[name], opened.get_tensor(name)
                    if (tensor.dtype, list(tensor.shape)) != (stored.dtype, stored.shape):
                        return False
                    parts = tensor.reshape(-1).view(torch.uint8).split(stored.parts)
                    if joined([digest_of(part) for part in parts]) != stored.digest:
                        return False
        except (SafetensorError, OSError):
            return False
        return True

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A tensor, or some of its rows, in memory. Raises an OSError that names the file where it cannot be read."""
        path = self.folder / self.tensors[name].file
        try:
            with safe_open(path, "pt") as file:
                whole = rows == slice(None)  # a tensor without dimensions has no slice
                tensor: Tensor = file.get_tensor(name) if whole else file.get_slice(name)[rows]
                return tensor.clone()  # of the mapped file
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error

    def files(self) -> dict[str, list[str]]:
        """The names of the tensors of each file."""
        names = defaultdict(list)
        for name, stored in self.tensors.items():
            names[stored.file].append(name)
        return dict(names)


def digest_of(data: Tensor) -> str:
    """The SHA-256 of bytes (n,) in CPU memory."""
    return hashlib.sha256(data.numpy().data).hexdigest()


def joined(digests: list[str]) -> str:
    """The digest of a tensor from those of its parts."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def raise_first(failures: list[OSError | None]) -> None:
    """Raises the first error, if there is one."""
    for failure in filter(None, failures):
        raise failure
