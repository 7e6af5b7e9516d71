"""Numbers that cost time to count, remembered on disk under a hash of all that they depend on."""

import hashlib
import os
import pickle
import struct
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any


def digest(thing: Any) -> bytes:
    """A hash of anything that can be pickled: another one for what differs, not always the same for what does not."""
    return hashlib.blake2b(pickle.dumps(thing, protocol=5), digest_size=20).digest()


def recall(folder: Path, name: bytes) -> list[int] | None:
    """The numbers that are remembered under a hash, or None where there are none, or they are damaged."""
    try:
        stored = (folder / name.hex()).read_bytes()
    except OSError:
        return None
    numbers = stored[len(name) :]
    if stored[: len(name)] != _seal(name, numbers):
        return None
    return list(struct.unpack(f"<{len(numbers) // 4}i", numbers))


def remember(folder: Path, name: bytes, numbers: list[int]) -> None:
    """Writes numbers below 2^31 under a hash; who reads meanwhile finds all of them or none.

    Raises:
        OSError: the folder cannot be written to.
    """
    stored = struct.pack(f"<{len(numbers)}i", *numbers)
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder, prefix=".", delete=False) as partial:
        partial.write(_seal(name, stored) + stored)
    os.replace(partial.name, folder / name.hex())


def _seal(name: bytes, numbers: bytes) -> bytes:
    return hashlib.blake2b(name + numbers, digest_size=len(name)).digest()
