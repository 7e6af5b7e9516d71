"""Files of rows in csv or JSON, and their rows, which are read from the file again when they are indexed."""

import csv
import io
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from os import fstat, pread
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

from rft.data.rows.lazy import ConvertRow, LazyRows, Row
from rft.data.strict_json import after_blanks, value_at
from rft.data.text import BYTE_ORDER_MARK, check_file, decoded

Located = tuple[str, Row]  # (file and line for messages, row)
OPEN_FILES = 64  # that a process holds open; a data set may have more files than a process may open
LONGEST_CELL = 2**31 - 1  # characters; the default of the csv module is 131,072
LONGEST_NUMBER = 308  # digits; longer ones exceed a float
LONG_NUMBER = re.compile(rf"[0-9]{{{LONGEST_NUMBER + 1}}}")


class TextFile(ABC):
    """A file of rows in a text format.

    Args:
        path: of the file.
        key: the yaml key that names it.

    Attributes:
        path, file: as messages name it, and where it is.
        begin: the byte behind which the rows stand; known when the first row is read.

    Raises:
        ValueError: there is no such file; names the key.
    """

    counted: ClassVar[str] = "line"  # what messages count in the file

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self.file = check_file(path, key)
        self.begin = 0

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """Reads all rows, as (line or row from 1, byte behind the row, row). The bytes of a row begin behind those of
        the row before it.

        Raises:
            ValueError: the file is not of its format; names the line or the row.
        """

    @abstractmethod
    def parse(self, data: bytes) -> Row:
        """The row that has these bytes in the file, as `scan` has read it."""

    def place(self, number: int) -> str:
        """The place of a row for messages: "<path> line <n>"."""
        return f"{self.path} {self.counted} {number}"

    def rows(self) -> Iterator[Located]:
        """Reads all rows, each with its place; raises what `scan` raises."""
        return ((self.place(number), row) for number, _, row in self.scan())


class TextRows(LazyRows):
    """Rows of a text file. 20 bytes a row are in memory: where it stands, and a checksum of its bytes.

    Args:
        file: is read once, to its end or to `limit`.
        check: converts a row, and raises a ValueError if the run cannot use it; is called once for each.
        convert: converts a row that has been checked.
        limit: takes the first `limit` rows, or all if None.
    """

    def __init__(self, file: TextFile, check: ConvertRow, convert: ConvertRow, limit: int | None) -> None:
        ends, lines, sums = array("q"), array("q"), array("I")
        with file.file.open("rb") as same:
            state = fstat(same.fileno())
            for line, end, raw in islice(file.scan(), limit):
                check(file.place(line), raw)
                begin = ends[-1] if ends else same.seek(file.begin)
                sums.append(crc32(same.read(end - begin)))
                ends.append(end)
                lines.append(line)
        identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

        def where(number: int) -> str:
            return file.place(lines[number])

        def read(number: int) -> Row:
            begin = ends[number - 1] if number else file.begin
            try:
                data = pread(_opened(file.file, identity).fileno(), ends[number] - begin, begin)
            except OSError as error:
                raise ValueError(f"{where(number)}: the file cannot be read again ({error}); restore it") from error
            if crc32(data) != sums[number]:
                raise ValueError(
                    f"{where(number)}: the row has changed since the run began; restore the file, and continue the run"
                )
            return convert(where(number), file.parse(data))

        super().__init__(len(ends), read, where)


class _Handle(io.FileIO):
    """A file that closes itself when the last reference to it is gone."""

    def __del__(self) -> None:
        self.close()


@lru_cache(OPEN_FILES)
def _opened(path: Path, identity: tuple[int, ...]) -> _Handle:
    """The file; `identity` is another one if the path has another file."""
    return _Handle(path)


def size(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def mark_size(file: Path) -> int:
    """The bytes of the byte order mark at the beginning of a file; 0 without one."""
    with file.open("rb") as opened:
        return len(BYTE_ORDER_MARK) * (opened.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK)


class CsvFile(TextFile):
    """A csv file whose first line names the fields. Cells are text, never numbers; empty cells are null.

    `scan` raises a ValueError if a line has more or fewer cells than the first, or is not csv in UTF-8, or the first
    line names a field twice; it names the line.
    """

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        csv.field_size_limit(LONGEST_CELL)
        with self.file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            end, first = mark_size(self.file), 1

            def read() -> Iterator[str]:
                nonlocal end
                for line in _checked(lines, self.path):
                    end += size(line)
                    yield line

            reader = csv.reader(read(), strict=True)
            try:
                names = self._names = next(reader, [])
                if len(set(names)) < len(names):
                    twice = next(name for name in names if names.count(name) > 1)
                    raise ValueError(f"{self.path} line 1: the field {twice!r:.60} is named twice; rename one")
                self.begin, first = end, reader.line_num + 1
                for cells in reader:
                    if cells and len(cells) != len(names):
                        where = self.place(reader.line_num)
                        raise ValueError(f"{where}: {len(cells)} cells, but line 1 names {len(names)} fields")
                    if cells:
                        yield reader.line_num, end, self._row(cells)
                    first = reader.line_num + 1
            except csv.Error as error:
                raise ValueError(
                    f"{self.path} line {first}: not csv in UTF-8 ({error}); close every quote, and write a quote in a "
                    "cell twice"
                ) from error

    def parse(self, data: bytes) -> Row:
        reader = csv.reader(io.StringIO(data.decode(), newline=""), strict=True)
        return self._row(next(cells for cells in reader if cells))

    def _row(self, cells: list[str]) -> Row:
        return {name: cell or None for name, cell in zip(self._names, cells, strict=True)}


def _checked(lines: Iterable[str], path: str) -> Iterator[str]:
    """The lines of a file that was opened with surrogateescape, which holds bytes that are not UTF-8 in a line."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise ValueError(f"{path} line {number}: not csv in UTF-8 (a NUL byte); write the file again")
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError as error:
                byte = ord(line[error.start]) - 0xDC00
                raise ValueError(
                    f"{path} line {number}: not UTF-8 (byte {byte:#04x}); save the file in UTF-8"
                ) from None
        yield line


class JsonLines(TextFile):
    """A file of one JSON object a line. Blank lines are skipped."""

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        end = 0
        with self.file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                end += len(line)
                if line.strip():
                    where = self.place(number)
                    yield number, end, _object(decoded(line, where), where)

    def parse(self, data: bytes) -> Row:
        row: Row = json.loads(decoded(data.lstrip(), self.path))
        return row


class JsonList(TextFile):
    """A file with a JSON list of objects."""

    counted = "row"

    def scan(self) -> Iterator[tuple[int, int, Row]]:
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
