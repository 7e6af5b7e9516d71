"""Checks of all rows before a model is loaded: answers that no response can match, and held-out rows that train; and
the identity of values, by which rows are compared."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rft.data.processes import in_chunks
from rft.data.rows.lazy import Row, Rows, place
from rft.distributed import World

PLACES = 5  # of rows that fail, in a message
AGENT = ("agent_name", "tools_kwargs", "interaction_kwargs")  # of verl, in the row or in its extra_info
SINGLE_TURN = "single_turn_agent"  # verl's name for one answer without tools


def check_rows(rows: Rows, check: Callable[[Row], None]) -> None:
    """Raises the first ValueError of `check`, with the place of its row and those of other rows that fail."""

    def failing(numbers: range) -> tuple[str, list[int]]:
        """The message about the first of these rows that fails, and the numbers of all that fail."""
        message, failed = "", list[int]()
        for number in numbers:
            try:
                check(rows[number])
            except ValueError as error:
                message = message or f"{place(rows, number)}: {error}"
                failed.append(number)
        return message, failed

    chunks = in_chunks("checked rows", len(rows), failing)
    others = [number for _, failed in chunks for number in failed][1:]
    if message := next((message for message, _ in chunks if message), ""):
        places = ", ".join(place(rows, number) for number in others[:PLACES])
        more = f" (other rows that fail: {len(others)}, the first at {places})" if others else ""
        raise ValueError(message + more)


def refuse_agents(row: Mapping[str, Any]) -> None:
    """Refuses a row that asks for tools or several turns, where one answer is sampled.

    Raises:
        ValueError: names the field.
    """
    extra = row.get("extra_info")
    for field in AGENT:
        for part in (row, extra if isinstance(extra, Mapping) else {}):
            if part.get(field) and part[field] != SINGLE_TURN:
                raise ValueError(
                    f"the field {field!r} asks for tools or several turns, and this run samples one answer without "
                    "tools; choose an environment, or remove the field if one answer is enough, or the row"
                )


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
    all_digests = {digest for of_set in digests.values() for digest in of_set}
    share = range(world.rank, len(train), world.size)

    def common(numbers: range) -> set[bytes]:
        rows = (train[number] for number in share[numbers.start : numbers.stop])
        return all_digests.intersection(_digest(row, fields) for row in rows)

    local = set[bytes]().union(*in_chunks("rows compared with held-out ones", len(share), common))
    trained = {digest for of_rank in world.gather(local) for digest in of_rank}
    compared = " and ".join(fields)
    for name, of_set in digests.items():
        count = sum(digest in trained for digest in of_set)
        if of_set and count == len(of_set):
            yield (
                f"data.eval.{name}: all of its {count} rows are in data.train (compared by {compared}), so nothing is "
                f"held out; give one of them another path, or split the rows with rft.data.rows.split.HashSplit"
            )
        elif count:
            log(
                f"data.eval.{name}: {count} of its {len(of_set)} rows are in data.train (compared by {compared}), so "
                "its metrics are not those of held-out rows alone; rft.data.rows.split.ExcludeRows leaves them out"
            )


def _digest(row: Row, fields: Sequence[str]) -> bytes:
    """A hash of these fields of a row; the same on every rank."""
    return digest([plain(row.get(field)) for field in fields])


def identity(value: Any) -> str:
    """A text that is the same for equal values: texts or messages, maybe with media."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_fingerprint)


def _fingerprint(value: Any) -> str:
    """The hash of bytes, or of an object that has them, such as an array."""
    return hashlib.blake2b(value if isinstance(value, bytes) else value.tobytes(), digest_size=20).hexdigest()


def digest(value: Any) -> bytes:
    """A hash that is the same for equal values, and for all processes."""
    return hashlib.blake2b(identity(value).encode(errors="surrogatepass"), digest_size=16).digest()


def plain(value: Any) -> Any:
    """A text without white space at its ends; a single message of a user is the same as its text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and value[0].get("role") == "user":
        value = value[0].get("content")
    return value.strip() if isinstance(value, str) else value
