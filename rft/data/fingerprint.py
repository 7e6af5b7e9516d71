"""Hashes of data sets, by which a resumed run notices that rows have changed, and a cache of token counts by hashes."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rft.data.rows.lazy import Rows

MOST = 1000  # rows that are read: all rows of a large data set would take as long as to load them
TRAIN = "data.train"
OF_TRAIN = "the run continues at its position in the new rows; restore the old ones, or start again with resume=never"
OF_OTHERS = "its metrics before and after this step are of different rows"


def fingerprint(rows: Rows) -> str:
    """A hash of the number of rows, and of at most `MOST` of them, evenly spread from the first to the last.

    Of media in other files it has the paths alone.
    """
    count = min(len(rows), MOST)
    chosen = [number * (len(rows) - 1) // max(count - 1, 1) for number in range(count)]
    digest_of_rows = hashlib.blake2b(str(len(rows)).encode(), digest_size=16)
    for number in chosen:
        digest_of_rows.update(
            json.dumps(rows[number], sort_keys=True, default=lambda value: digest(value).hex()).encode()
        )
    return digest_of_rows.hexdigest()


def warn_of_changed_rows(before: Mapping[str, str], now: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Names every data set that has other rows than before, and what happens.

    Args:
        before, now: the hash of each set, by its yaml key.
        warn: is called with each message.
    """
    for key in now:
        if key in before and before[key] != now[key]:
            effect = OF_TRAIN if key == TRAIN else OF_OTHERS
            warn(f"{key} has other rows than when the checkpoint was written: {effect}")


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
