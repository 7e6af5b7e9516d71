"""Hashes of data sets, by which a resumed run notices that rows have changed."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from rft.data.encode.cache import digest
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
    found = hashlib.blake2b(str(len(rows)).encode(), digest_size=16)
    for number in chosen:
        found.update(json.dumps(rows[number], sort_keys=True, default=_spell).encode())
    return found.hexdigest()


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


def _spell(value: Any) -> str:
    return digest(value).hex()
