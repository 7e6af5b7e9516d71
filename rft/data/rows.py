"""Where rows come from: a jsonl file, or a data set of the Hugging Face hub (or a local folder in one of its formats).

A row is a plain dict. `columns` gives fields the names that the project knows (`{prompt: question}`); all other fields
stay as they are, for rewards and logs.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.registry import did_you_mean

Located = Iterable[tuple[str, dict[str, Any]]]  # (where it stands, the row), for messages


class JsonLines:
    """Rows of a file with one JSON object a line. Blank lines are skipped.

    Args:
        path: the file.
        columns: {our name: its name in the file}.
        limit: the first so many rows, or null for all.
        key: supplied; the node's place in the yaml, for messages.
    """

    def __init__(self, path: str, columns: dict[str, str], limit: int | None, key: str) -> None:
        check_limit(limit, key)
        self._path = path
        self._columns = columns
        self._limit = limit
        self._key = key

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """All rows.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: the file is missing, empty or not JSON, or a row lacks a field; names the file, the line and
                the key.
        """
        rows = itertools.islice(json_lines(self._path, f"{self._key}.path"), self._limit)
        return admit(rows, self._columns, required, self._key, self._path)


class HubRows:
    """Rows of `datasets.load_dataset`: a data set of the hub, or a local folder of parquet, json or csv files.

    Args:
        path: name on the hub ("openai/gsm8k") or folder.
        name: its configuration ("main"), or null where it has only one.
        split: "train", or a slice such as "train[:500]".
        columns, limit, key: as in `JsonLines`.
    """

    def __init__(
        self, path: str, name: str | None, split: str, columns: dict[str, str], limit: int | None, key: str
    ) -> None:
        check_limit(limit, key)
        self._path = path
        self._name = name
        self._split = split
        self._columns = columns
        self._limit = limit
        self._key = key

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """All rows.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: the package is not installed, the data set cannot be had, or a row lacks a field; names the key.
        """
        try:
            import datasets
        except ImportError as error:
            raise ValueError(f"{self._key} needs the package datasets: pip install datasets") from error
        try:
            table = datasets.load_dataset(self._path, self._name, split=self._split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"{self._key}: cannot load path={self._path!r} name={self._name!r} split={self._split!r}: {error}"
            ) from error
        title = f"{self._path}[{self._split}]"
        rows = ((f"{title} row {number}", dict(row)) for number, row in enumerate(table, start=1))
        return admit(itertools.islice(rows, self._limit), self._columns, required, self._key, title)


def json_lines(path: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads a jsonl file as ("<path> line <n>", object) pairs.

    Raises:
        ValueError: there is no such file (names `key`), or a line is not a JSON object (names the line).
    """
    file = Path(path).expanduser()
    if not file.is_file():
        found = "it is a folder" if file.is_dir() else "there is no such file"
        raise ValueError(f"{key}={path}: {found}; give the path of a jsonl file")
    with file.open("rb") as lines:
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


def admit(
    located: Located, columns: Mapping[str, str], required: Sequence[str], key: str, title: str
) -> list[dict[str, Any]]:
    """Renames the fields of rows and checks that each has what is required.

    Raises:
        ValueError: there is no row, or a row lacks a field or has null in it; names where it stands and the key.
    """
    rows = []
    for where, raw in located:
        for ours, theirs in columns.items():
            require(raw, theirs, where, f"{key}.columns.{ours} names it")
        row = raw | {ours: raw[theirs] for ours, theirs in columns.items()}
        for field in required:
            require(row, field, where, f"say where it is with +{key}.columns.{field}=<its name there>")
        rows.append(row)
    if not rows:
        raise ValueError(f"{key}.path: {title} holds no rows")
    return rows


def require(row: Mapping[str, Any], field: str, where: str, cure: str) -> None:
    """Raises a ValueError where a row lacks the field or has null in it."""
    if field not in row:
        known = f"there are: {', '.join(row) or 'none'}{did_you_mean(field, row)}"
        raise ValueError(f"{where}: no field {field!r} ({known}); {cure}")
    if row[field] is None:
        raise ValueError(f"{where}: the field {field!r} is null; {cure}")


def check_limit(limit: int | None, key: str) -> None:
    """Raises a ValueError where a limit would leave no rows."""
    if limit is not None and limit < 1:
        raise ValueError(f"{key}.limit={limit} leaves no rows; give at least 1, or null for all")
