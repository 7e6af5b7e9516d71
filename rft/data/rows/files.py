"""Reads files of rows: jsonl, json, csv and parquet, by their extension. Every row comes with its file and line."""

import csv
import glob
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Located = tuple[str, dict[str, Any]]  # (file and line for messages, row)
READ_AHEAD = 1024  # rows of a parquet file that are read at once
LONGEST_CELL = 2**31 - 1  # characters; the default of the csv module is 131,072


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
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error}); expected one object a line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
            yield where, row


def json_rows(path: str, key: str) -> Iterator[Located]:
    """Reads a file with a JSON list of objects, or with one object a line, as many .json files have.

    Raises:
        ValueError: as in `json_lines`; for a list, it names the index of the row.
    """
    text = check_file(path, key).read_bytes().removeprefix(b"\xef\xbb\xbf")
    if text.lstrip()[:1] != b"[":
        yield from json_lines(path, key)
        return
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); expected a list of objects") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path} row {number}: expected a JSON object, got {type(row).__name__}")
        yield f"{path} row {number}", row


def csv_rows(path: str, key: str) -> Iterator[Located]:
    """Reads a csv file whose first line names the fields. Cells are text, never numbers; empty cells are null.

    Raises:
        ValueError: a line has more or fewer cells than the first, or is not csv in UTF-8; names the line.
    """
    csv.field_size_limit(LONGEST_CELL)
    with check_file(path, key).open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            names = next(reader, [])
            for cells in reader:
                where = f"{path} line {reader.line_num}"
                if cells and len(cells) != len(names):
                    raise ValueError(f"{where}: {len(cells)} cells, but line 1 names {len(names)} fields")
                if cells:
                    yield where, {name: cell or None for name, cell in zip(names, cells, strict=True)}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} line {reader.line_num}: not csv in UTF-8 ({error})") from error


def open_parquet(path: str, key: str) -> Any:
    """A parquet file as a table of the package datasets, which reads rows from disk.

    Raises:
        ValueError: it cannot be read; names `key`.
    """
    import datasets

    try:
        return datasets.Dataset.from_parquet(path)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{key}={path}: not a parquet file that can be read ({error})") from error


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
    except (OSError, ArrowException) as error:
        raise ValueError(f"{key}={path}: not a parquet file that can be read ({error})") from error


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
