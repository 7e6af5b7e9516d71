"""Checks of all rows before a model is loaded: answers that no response can match, and held-out rows that train."""

import hashlib
from collections.abc import Callable, Iterator, Sequence

from rft.data.rows.lazy import Row, Rows, located, place
from rft.data.rows.split import identity, plain
from rft.distributed import World

PLACES = 5  # of rows that fail, in a message


def check_rows(rows: Rows, check: Callable[[Row], None]) -> None:
    """Raises the first ValueError of `check`, with the place of its row and those of other rows that fail."""
    failed: dict[int, ValueError] = {}
    for number, row in enumerate(rows):
        try:
            with located(rows, number):
                check(row)
        except ValueError as error:
            failed[number] = error
    if failed:
        first, *others = failed
        places = ", ".join(place(rows, number) for number in others[:PLACES])
        more = f" (other rows that fail: {len(others)}, the first at {places})" if others else ""
        raise ValueError(f"{failed[first]}{more}") from failed[first]


def check_held_out(
    train: Rows, held_out: dict[str, Rows], fields: Sequence[str], world: World, log: Callable[[str], None]
) -> Iterator[str]:
    """Compares the held-out rows with those to train on. A collective.

    Args:
        train: the rows to train on; of a stream, the first ones.
        held_out: the held-out sets by name.
        fields: the fields that an evaluation reads; nothing is compared if the rows to train on lack one.
        world: the ranks that share the work.
        log: shows a message to the user: how many rows of a set train.

    Yields:
        A message for every set all of whose rows train.
    """
    if not held_out or any(field not in row for row in train[:1] for field in fields):
        return
    digests = {name: [_digest(row, fields) for row in rows] for name, rows in held_out.items()}
    known = {digest for found in digests.values() for digest in found}
    local = {_digest(train[number], fields) for number in range(world.rank, len(train), world.size)} & known
    trained = {digest for found in world.gather(local) for digest in found}
    compared = " and ".join(fields)
    for name, found in digests.items():
        count = sum(digest in trained for digest in found)
        if found and count == len(found):
            yield (
                f"data.eval.{name}: all of its {count} rows are in data.train (compared by {compared}), so nothing is "
                f"held out; give one of them another path, or split the rows with rft.data.rows.split.HashSplit"
            )
        elif count:
            log(
                f"data.eval.{name}: {count} of its {len(found)} rows are in data.train (compared by {compared}), so "
                "its metrics are not those of held-out rows alone; rft.data.rows.split.ExcludeRows leaves them out"
            )


def _digest(row: Row, fields: Sequence[str]) -> bytes:
    """A hash of these fields of a row; the same on every rank."""
    text = identity([plain(row.get(field)) for field in fields])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
