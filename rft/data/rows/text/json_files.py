"""Files of JSON: one object a line, or one list of objects."""

import json
import re
from collections.abc import Iterator
from typing import Any

from rft.data.rows.lazy import Row
from rft.data.rows.text.base import BYTE_ORDER_MARK, Located, TextFile, check_file, decoded, mark_size, size
from rft.data.strict_json import after_blanks, value_at

LONGEST_NUMBER = 308  # digits; longer ones exceed a float
LONG_NUMBER = re.compile(rf"[0-9]{{{LONGEST_NUMBER + 1}}}")


class JsonLines(TextFile):
    """A file of one JSON object a line. Blank lines are skipped."""

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """See `TextFile.scan`."""
        end = 0
        with self.file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                end += len(line)
                if line.strip():
                    where = self.place(number)
                    yield number, end, _object(decoded(line, where), where)

    def parse(self, data: bytes) -> Row:
        """See `TextFile.parse`."""
        row: Row = json.loads(decoded(data.lstrip(), self.path))
        return row


class JsonList(TextFile):
    """A file with a JSON list of objects."""

    counted = "row"

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """See `TextFile.scan`."""
        text, number, end = decoded(self.file.read_bytes(), self.path), 0, mark_size(self.file)
        digits, begin = _digits(text), 0
        place = after_blanks(text, text.index("[") + 1)
        while number or text[place : place + 1] != "]":
            number += 1
            where = self.place(number)
            row, place = _parse(text, place, where, digits)
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            end, begin = end + size(text[begin:place]), place
            yield number, end, row
            place = after_blanks(text, place)
            if text[place : place + 1] != ",":
                break
            place = after_blanks(text, place + 1)
        if text[place : place + 1] != "]" or text[place + 1 :].strip():
            raise ValueError(
                f"{self.path} row {number}: not JSON (the list does not end after it); expected a list of objects"
            )

    def parse(self, data: bytes) -> Row:
        """See `TextFile.parse`."""
        row: Row = json.loads(data[data.index(b"{") :].decode())
        return row


def json_file(path: str, key: str) -> TextFile:
    """A file with a JSON list of objects, or with one object a line, as many .json files have.

    Raises:
        ValueError: there is no such file; names the key.
    """
    with check_file(path, key).open("rb") as file:
        first = next((line for line in file if line.removeprefix(BYTE_ORDER_MARK).strip()), b"")
    return (JsonList if first.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[" else JsonLines)(path, key)


def json_lines(path: str, key: str) -> Iterator[Located]:
    """Reads a file of one JSON object a line as ("<path> line <n>", object) pairs. Blank lines are skipped.

    Raises:
        ValueError: there is no such file (names `key`), or a line is not a JSON object (names the line).
    """
    yield from JsonLines(path, key).rows()


def _parse(text: str, place: int, where: str, digits: int | None) -> tuple[Any, int]:
    """The JSON value at an index of a text, behind blanks, and the index of its end.

    Args:
        digits: see `value_at`.

    Raises:
        ValueError: it is not JSON, a key occurs twice in an object, it is nested too deeply, a number is too long or a
            text is not Unicode; names `where`.
    """
    try:
        return value_at(text, place, unique=True, finite=False, digits=digits)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); write an object with double quotes") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that is the whole text."""
    row, end = _parse(text, 0, where, _digits(text))
    if text[end:].strip():
        raise ValueError(f"{where}: not JSON (more text follows the value); expected one object a line")
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
    return row


def _digits(text: str) -> int | None:
    """The limit for integers of a text that may have a longer one; to check every number is slow."""
    return LONGEST_NUMBER if LONG_NUMBER.search(text) else None
