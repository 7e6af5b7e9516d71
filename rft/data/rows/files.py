"""Reads files of rows: jsonl, json, csv and parquet, by their extension. Every row comes with its file and line."""

import csv
import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rft.data.strict_json import after_blanks, value_at

Located = tuple[str, dict[str, Any]]  # (file and line for messages, row)
READ_AHEAD = 1024  # rows of a parquet file that are read at once
LONGEST_CELL = 2**31 - 1  # characters; the default of the csv module is 131,072
LONGEST_NUMBER = 308  # digits; longer ones exceed a float
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONG_NUMBER = re.compile(rf"[0-9]{{{LONGEST_NUMBER + 1}}}")


def find_files(path: str | list[str], key: str) -> list[str]:
    """The files of a path, of a pattern such as "part-*.parquet", or of a list of both; a pattern gives sorted files.

    Raises:
        ValueError: one of them matches no file, or a file has an unknown extension; names `key`.
    """
    found = []
    for name in [path] if isinstance(path, str) else path:
        literal = Path(name).expanduser()
        matches = [str(literal)] if literal.exists() else sorted(glob.glob(str(literal), recursive=True))
        if not matches and glob.has_magic(name):
            raise ValueError(f"{key}={name}: no file matches this pattern")
        found += matches or [name]
    for name in found:
        check_file(name, key)
        if Path(name).suffix not in ENDINGS:
            raise ValueError(f"{key}={name}: the extension gives the format and must be one of {', '.join(ENDINGS)}")
    if not found:
        raise ValueError(f"{key}={path}: give the path of a file")
    return found


def check_file(path: str, key: str) -> Path:
    """The file of that path.

    Raises:
        ValueError: it does not exist or is a folder; names `key`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        found = "it is a folder" if file.is_dir() else "there is no such file"
        raise ValueError(f"{key}={path}: {found}; give the path of a file")
    return file


def read_text(path: str, key: str) -> str:
    """The text of a file.

    Raises:
        ValueError: there is no such file, or it is not in UTF-8; names `key`.
    """
    return _decoded(check_file(path, key).read_bytes(), f"{key}={path}")


def json_lines(path: str, key: str) -> Iterator[Located]:
    """Reads a file of one JSON object a line as ("<path> line <n>", object) pairs. Blank lines are skipped.

    Raises:
        ValueError: there is no such file (names `key`), or a line is not a JSON object (names the line).
    """
    with check_file(path, key).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            yield where, _object(_decoded(line, where), where)


def json_rows(path: str, key: str) -> Iterator[Located]:
    """Reads a file with a JSON list of objects, or with one object a line, as many .json files have.

    Raises:
        ValueError: as in `json_lines`; for a list, it names the number of the row.
    """
    data = check_file(path, key).read_bytes()
    if data.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] != b"[":
        yield from json_lines(path, key)
        return
    text, number = _decoded(data, path), 0
    digits = _most_digits(text)
    place = after_blanks(text, text.index("[") + 1)
    while number or text[place : place + 1] != "]":
        number += 1
        where = f"{path} row {number}"
        row, place = _parse(text, place, digits, where)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield where, row
        place = after_blanks(text, place)
        if text[place : place + 1] != ",":
            break
        place = after_blanks(text, place + 1)
    if text[place : place + 1] != "]" or text[place + 1 :].strip():
        raise ValueError(f"{path} row {number}: not JSON (the list does not end after it); expected a list of objects")


def _parse(text: str, start: int, digits: int | None, where: str) -> tuple[Any, int]:
    """`value_at` of a row, in which a number may be NaN, as tables write a missing value.

    Raises:
        ValueError: it is not JSON, or beyond the limits; names `where`.
    """
    try:
        return value_at(text, start, unique=True, finite=False, digits=digits)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); write an object with double quotes") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _most_digits(text: str) -> int | None:
    """The limit of digits; None, which reads faster, where no number of the text reaches it."""
    return LONGEST_NUMBER if LONG_NUMBER.search(text) else None


def _object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that is the whole text."""
    row, end = _parse(text, 0, _most_digits(text), where)
    if text[end:].strip():
        raise ValueError(f"{where}: not JSON (more text follows the value); expected one object a line")
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
    return row


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: {not_utf8(error)}") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """A message about bytes that are not UTF-8, with their line if there are several."""
    line = error.object[: error.start].count(b"\n") + 1
    at = f" in line {line}" if line > 1 else ""
    return f"not UTF-8 (byte {error.object[error.start]:#04x}{at}); save the file in UTF-8"


def csv_rows(path: str, key: str) -> Iterator[Located]:
    """Reads a csv file whose first line names the fields. Cells are text, never numbers; empty cells are null.

    Raises:
        ValueError: a line has more or fewer cells than the first, or is not csv in UTF-8, or the first line names a
            field twice; names the line.
    """
    csv.field_size_limit(LONGEST_CELL)
    with check_file(path, key).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(_checked(lines, path), strict=True)
        begin = 1
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"{path} line 1: the field {twice!r:.60} is named twice; rename one")
            begin = reader.line_num + 1
            for cells in reader:
                where = f"{path} line {reader.line_num}"
                if cells and len(cells) != len(names):
                    raise ValueError(f"{where}: {len(cells)} cells, but line 1 names {len(names)} fields")
                if cells:
                    yield where, {name: cell or None for name, cell in zip(names, cells, strict=True)}
                begin = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path} line {begin}: not csv in UTF-8 ({error}); close every quote, and write a quote in a cell twice"
            ) from error


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


def open_parquet(path: str, key: str) -> Any:
    """A parquet file as a table of the package datasets, which reads rows from disk.

    Raises:
        ValueError: it cannot be read; names `key`.
    """
    import datasets
    from pyarrow import ArrowException

    try:
        return datasets.Dataset.from_parquet(path)
    except (OSError, ValueError, ArrowException, datasets.exceptions.DatasetsError) as error:
        raise unreadable(f"{key}={path}", error) from error


def parquet_rows(path: str, key: str) -> Iterator[Located]:
    """Reads a parquet file in batches, without the copy on disk that `open_parquet` makes.

    Raises:
        ValueError: it cannot be read; names `key`.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(check_file(path, key)) as table:
            for start, rows in enumerate(table.iter_batches(READ_AHEAD)):
                for number, row in enumerate(rows.to_pylist(), start * READ_AHEAD + 1):
                    yield f"{path} row {number}", without_nulls(row)
    except (OSError, ValueError, ArrowException) as error:
        raise unreadable(f"{key}={path}", error) from error


def unreadable(where: str, error: Exception) -> ValueError:
    """The error of a table that another package cannot read, in one line."""
    return ValueError(f"{where}: not a parquet file that can be read ({' '.join(str(error).split())}); write it again")


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """The row without nulls inside its fields: tables add the keys of all other rows to every struct."""
    return {name: _stripped(value) for name, value in row.items()}


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stripped(inner) for name, inner in value.items() if inner is not None}
    return [_stripped(inner) for inner in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[str, str], Iterator[Located]]] = {
    ".jsonl": json_lines,
    ".json": json_rows,
    ".csv": csv_rows,
}
ENDINGS = (*READERS, ".parquet")
WHOLE = READERS | {".parquet": parquet_rows}  # for rows that are all held in memory
STREAMED = {ending: reader for ending, reader in READERS.items() if ending != ".json"} | {".parquet": parquet_rows}
