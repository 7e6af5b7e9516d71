"""Reads files of rows: jsonl, json, csv and parquet, by their extension. Every row comes with its file and line."""

import glob
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rft.data.rows.text_files import CsvFile, JsonLines, Located, TextFile, json_file
from rft.data.text import check_file

READ_AHEAD = 1024  # rows of a parquet file that are read at once
TEXT_FILES: dict[str, Callable[[str, str], TextFile]] = {".jsonl": JsonLines, ".json": json_file, ".csv": CsvFile}
ENDINGS = (*TEXT_FILES, ".parquet")
STREAMED = tuple(ending for ending in ENDINGS if ending != ".json")


def find_files(path: str | list[str], key: str) -> list[str]:
    """The files of a path, of a pattern such as "part-*.parquet", or of a list of both; a pattern gives sorted files.

    Raises:
        ValueError: one of them matches no file, or a file has an unknown extension; names `key`.
    """
    files = []
    for name in [path] if isinstance(path, str) else path:
        literal = Path(name).expanduser()
        matches = [str(literal)] if literal.exists() else sorted(glob.glob(str(literal), recursive=True))
        if not matches and glob.has_magic(name):
            raise ValueError(f"{key}={name}: no file matches this pattern")
        files += matches or [name]
    for name in files:
        check_file(name, key)
        if Path(name).suffix not in ENDINGS:
            raise ValueError(f"{key}={name}: the extension gives the format and must be one of {', '.join(ENDINGS)}")
    if not files:
        raise ValueError(f"{key}={path}: give the path of a file")
    return files


def read_rows(path: str, key: str) -> Iterator[Located]:
    """Reads the rows of a file one after another, each with its place; the extension gives the format.

    Raises:
        ValueError: there is no such file (names `key`), or it is not of its format (names the line or the row).
    """
    ending = Path(path).suffix
    yield from TEXT_FILES[ending](path, key).rows() if ending in TEXT_FILES else parquet_rows(path, key)


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
