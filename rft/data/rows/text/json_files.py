"""Files of JSON: one object a line, or one list of objects."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rft.data.rows.lazy import Row
from rft.data.rows.text.base import BYTE_ORDER_MARK, Located, TextFile, check_file, decoded, mark_size, size

DEEPEST = 64  # levels of lists and objects in a row of json
LONGEST_NUMBER = 308  # digits; longer ones exceed a float
LONG_NUMBER = re.compile(rf"[0-9]{{{LONGEST_NUMBER + 1}}}")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
BLANKS = re.compile(r"[ \t\n\r]*")  # what json allows between values


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
        decoder, begin = _decoder(text), 0
        place = _after_blanks(text, text.index("[") + 1)
        while number or text[place : place + 1] != "]":
            number += 1
            where = self.place(number)
            row, place = _parse(decoder, text, place, where)
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            end, begin = end + size(text[begin:place]), place
            yield number, end, row
            place = _after_blanks(text, place)
            if text[place : place + 1] != ",":
                break
            place = _after_blanks(text, place + 1)
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


def _parse(decoder: json.JSONDecoder, text: str, start: int, where: str) -> tuple[Any, int]:
    """The JSON value at an index of a text, and the index of its end.

    Raises:
        ValueError: it is not JSON, a key occurs twice in an object, it is nested too deeply, a number is too long or a
            text is not Unicode; names `where`.
    """
    try:
        value, end = decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError(f"{where}: {TOO_DEEP}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); write an object with double quotes") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if text.count("[", start, end) + text.count("{", start, end) > DEEPEST and _too_deep(value):
        raise ValueError(f"{where}: {TOO_DEEP}")
    if SURROGATE.search(text, start, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = error.object[error.start].encode("unicode-escape").decode()
            raise ValueError(
                f"{where}: half of a surrogate pair, {found}, is no character; write the text in UTF-8"
            ) from None
    return value, end


def _object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that is the whole text."""
    row, end = _parse(_decoder(text), text, _after_blanks(text, 0), where)
    if text[end:].strip():
        raise ValueError(f"{where}: not JSON (more text follows the value); expected one object a line")
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.60} occurs twice in one object; remove one")
    return found


def _number(digits: str) -> int:
    if len(digits.lstrip("-")) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits):,} digits; write it as a text")
    return int(digits)


DECODER = json.JSONDecoder(object_pairs_hook=_unique)
NUMBERS_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_number)  # slow where there are many numbers
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} levels deep; write flatter rows"


def _decoder(text: str) -> json.JSONDecoder:
    """The decoder of a text: with a check of every number if there may be a long one."""
    return NUMBERS_DECODER if LONG_NUMBER.search(text) else DECODER


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    return any(isinstance(item, dict | list) for item in level)


def _after_blanks(text: str, place: int) -> int:
    found = BLANKS.match(text, place)
    assert found is not None, "it matches an empty text"
    return found.end()
