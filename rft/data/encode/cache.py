"""A cache of token counts on disk, keyed by a hash of everything that they depend on."""

import hashlib
import os
import pickle
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def digest(thing: Any) -> bytes:
    """A hash of anything that can be pickled. Equal things have different hashes if their pickles differ."""
    return hashlib.blake2b(pickle.dumps(thing, protocol=5), digest_size=20).digest()


def recall(folder: Path, name: bytes) -> NDArray[np.int32] | None:
    """The numbers cached under a hash, or None if there are none or the file is damaged."""
    try:
        stored = (folder / name.hex()).read_bytes()
    except OSError:
        return None
    numbers = stored[len(name) :]
    if stored[: len(name)] != _checksum(name, numbers):
        return None
    return np.frombuffer(numbers, "<i4")


def remember(folder: Path, name: bytes, numbers: ArrayLike) -> None:
    """Caches numbers below 2^31 under a hash. The write is atomic: a concurrent reader finds all of them or none.

    Raises:
        OSError: the folder cannot be written to.
    """
    stored = np.asarray(numbers, "<i4").tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder, prefix=".", delete=False) as partial:
        partial.write(_checksum(name, stored) + stored)
    os.replace(partial.name, folder / name.hex())


def _checksum(name: bytes, numbers: bytes) -> bytes:
    return hashlib.blake2b(name + numbers, digest_size=len(name)).digest()
