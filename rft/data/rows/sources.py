"""Rows of files, of a data set of the Hugging Face hub, or of a folder.

A row is a plain dict. `columns` renames fields to the names of this project (`{prompt: question}`), `schema` converts
rows of a known format; media become parts of the messages; all other fields stay unchanged, for rewards and logs. Rows
stay on disk; each is checked once, at the start.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.batch.row_fields import check_names
from rft.data.encode.media.normal import COLUMNS, MESSAGES, normalize_media, undecoded
from rft.data.encode.parts import conversation, text_of
from rft.data.rows.base import StreamableRows
from rft.data.rows.files import (
    STREAMED,
    TEXT_FILES,
    find_files,
    open_parquet,
    read_rows,
    unreadable,
    without_nulls,
)
from rft.data.rows.lazy import ConcatRows, ConvertRow, LazyRows, Row, Rows
from rft.data.rows.schemas import SCHEMAS
from rft.data.rows.stream import RowStream, ShardReader
from rft.data.rows.text_files import TextRows
from rft.errors import did_you_mean, listed, prefixed
from rft.ranges import PositiveInt
from rft.sanitize import LONGEST_NAME, one_line
from rft.waits import waiting

FIELDS_SHOWN = 20  # names of fields in a message
EMPTY_ALLOWED = ("rejected", "completion")  # an empty answer can be the worse one
FIELDS = (*MESSAGES, "text")  # texts, or lists of chat messages
LONGEST = 5_000_000  # characters; to count the tokens of a longer text takes minutes, and no model reads it


@dataclass
class FileRows(StreamableRows):
    """Rows of files; the extension gives the format: .jsonl, .json, .csv (every cell is text) or .parquet.

    Args:
        path: a file, a pattern such as "data/part-*.parquet", or a list of them.
        columns: {name in this project: name in the file}; null removes an entry of an option file. A name with dots is
            a path through nested fields: `reward_model.ground_truth`.
        schema: the format of the rows as a node of the registry `SCHEMAS`, or null; applied after `columns`.
        limit: takes the first `limit` rows, or all if null.
        key: supplied by the run: the yaml key of the node, for messages.
    """

    path: str | list[str]
    columns: dict[str, str | None]
    schema: dict[str, Any] | None
    limit: PositiveInt | None
    key: str

    def __post_init__(self) -> None:
        self._converter = row_converter(self.columns, self.schema, self.key)

    def load(self, required: Sequence[str]) -> Rows:
        """All rows.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: a file is missing, empty or not of its format, or a row lacks a field; names the file, the line
                or row, and the key.
        """
        key = f"{self.key}.path"
        parts: list[Rows] = []
        left = self.limit
        for file in find_files(self.path, key):
            check, convert = (self._converter(fields, Path(file).parent) for fields in (required, ()))
            if (ending := Path(file).suffix) in TEXT_FILES:
                rows: Rows = TextRows(TEXT_FILES[ending](file, key), check, convert, left)
            else:
                rows = table_rows(open_parquet(file, key), check, convert, file, left)
            if not rows:
                raise ValueError(f"{key}: {file} holds no rows")
            parts.append(rows)
            left = None if left is None else left - len(rows)
            if left == 0:
                break
        return parts[0] if len(parts) == 1 else ConcatRows(parts)

    def stream(self, required: Sequence[str]) -> RowStream:
        """The stream of the rows: one shard for each file."""
        key = f"{self.key}.path"
        files = find_files(self.path, key)
        if unsupported := [file for file in files if Path(file).suffix not in STREAMED]:
            raise ValueError(
                f"{key}: {unsupported[0]} cannot be streamed; write {', '.join(STREAMED)}, or set data.streaming=null"
            )

        def part(file: str) -> ShardReader:
            convert = self._converter(required, Path(file).parent)
            return lambda start: (
                convert(where, raw) for where, raw in itertools.islice(read_rows(file, key), start, None)
            )

        return RowStream(limited([part(file) for file in files], self.limit), self.key)


@dataclass
class HubRows(StreamableRows):
    """Rows of a data set: of the hub, of a folder with parquet, json or csv files, of a folder of `save_to_disk`, or of
    a file.

    Args:
        path: name on the hub ("openai/gsm8k"), folder, or a file that `FileRows` reads.
        name: its configuration ("main"), or null if it has only one.
        split: "train", or a slice such as "train[:500]" (not of a folder of `save_to_disk`); null if such a folder
            holds one table, and for a file.
        columns, schema, limit, key: as in `FileRows`.

    Raises:
        ValueError: the path is a file, and name or split are set.
    """

    path: str
    name: str | None
    split: str | None
    columns: dict[str, str | None]
    schema: dict[str, Any] | None
    limit: PositiveInt | None
    key: str

    def __post_init__(self) -> None:
        path, key, columns = self.path, self.key, self.columns
        is_file = Path(path).expanduser().is_file()
        self._file = FileRows(path, columns, self.schema, self.limit, key) if is_file else None
        of_sets = (("name", self.name), ("split", self.split))
        unread = [f"{key}.{option}=null" for option, value in of_sets if value is not None]
        if is_file and unread:
            raise ValueError(f"{key}.path={path} is one file; set {' and '.join(unread)}")
        self._converter = row_converter(columns, self.schema, key)

    def load(self, required: Sequence[str]) -> Rows:
        """All rows.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: the package is not installed, the data set cannot be loaded, or a row lacks a field. It names
                the key.
        """
        if self._file is not None:
            return self._file.load(required)
        table, title = self._open(streaming=False), self._title
        check, convert = (self._converter(fields, self._folder) for fields in (required, ()))
        rows = table_rows(table, check, convert, title, self.limit)
        if not rows:
            raise ValueError(f"{self.key}.path: {title} holds no rows")
        return rows

    def stream(self, required: Sequence[str]) -> RowStream:
        """The stream of the rows, from the shards of the data set; those of the hub are downloaded when read."""
        if self._file is not None:
            return self._file.stream(required)
        table, title, convert = self._open(streaming=True), self._title, self._converter(required, self._folder)
        if table.features is not None:
            table = table.cast(undecoded(table.features))

        def part(shard: int) -> ShardReader:
            rows = table.shard(table.num_shards, shard)
            where = f"{title} shard {shard + 1} row"
            return lambda start: (
                convert(f"{where} {number}", without_nulls(raw))
                for number, raw in enumerate(rows.skip(start), start + 1)
            )

        return RowStream(limited([part(shard) for shard in range(table.num_shards)], self.limit), self.key)

    @property
    def _title(self) -> str:
        return self.path if self.split is None else f"{self.path}[{self.split}]"

    @property
    def _folder(self) -> Path | None:
        """Where relative paths in the rows begin; nowhere in a data set of the hub."""
        folder = Path(self.path).expanduser()
        return folder if folder.is_dir() else None

    def _open(self, streaming: bool) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(f"{self.key} needs the package datasets: pip install datasets") from error
        folder = Path(self.path).expanduser()
        saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
        try:
            if saved and self.name is None:
                table = datasets.load_from_disk(folder)
                if self.split is not None and not isinstance(table, dict):
                    raise ValueError(f"the folder holds one table; set {self.key}.split=null")
                table = table if self.split is None else table[self.split]
                if streaming and not isinstance(table, dict):
                    table = table.to_iterable_dataset()
            else:
                what = f"{self.key}: the package datasets loads {self.path}, or waits for a process that does"
                with waiting(what):
                    table = datasets.load_dataset(self.path, self.name, split=self.split, streaming=streaming)
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"{self.key}: cannot load path={self.path!r} name={self.name!r} split={self.split!r}: {error}"
            ) from error
        if isinstance(table, dict):
            raise ValueError(f"{self.key}.split: {self.path} has the splits {', '.join(table)}; name one of them")
        return table


def limited(shards: list[ShardReader], limit: int | None) -> list[ShardReader]:
    """The shards; with a limit, one shard with the first rows of all shards in file order."""
    if limit is None:
        return shards
    return [lambda start: itertools.islice(itertools.chain.from_iterable(shard(0) for shard in shards), start, limit)]


def table_rows(table: Any, check: ConvertRow, convert: ConvertRow, title: str, limit: int | None) -> Rows:
    """The first rows of a table of the package datasets. Each is checked once, and read again when it is indexed.

    Args:
        check, convert: as of `TextRows`.
        limit: takes the first `limit` rows, or all if None.
    """

    def where(number: int) -> str:
        return f"{title} row {number + 1}"

    count = len(table) if limit is None else min(limit, len(table))
    features, rows = undecoded(table.features), table.with_format("arrow")

    def raw(number: int) -> Row:
        try:
            return without_nulls(features.decode_example(rows[number].to_pylist()[0]))
        except ValueError as error:  # such as a text that is not UTF-8
            raise unreadable(where(number), error) from error

    for number in range(count):
        check(where(number), raw(number))
    return LazyRows(count, lambda number: convert(where(number), raw(number)), where)


def row_converter(
    columns: Mapping[str, str | None], schema: dict[str, Any] | None, key: str
) -> Callable[[Iterable[str], Path | None], ConvertRow]:
    """Makes a function that takes the required fields and the folder of the rows, and returns the function that
    converts a row.

    Raises:
        ValueError: there is no such schema, or an option of it is wrong.
    """
    names = {name: source for name, source in columns.items() if source is not None}
    apply_schema = None if schema is None else SCHEMAS.build(schema, f"{key}.schema")

    def converter(required: Iterable[str], folder: Path | None) -> ConvertRow:
        def convert(where: str, raw: Row) -> Row:
            row = dict(raw)
            for name, source in names.items():
                cure = f"set {key}.columns.{name} to its name"
                row[name] = find(raw, source, where, f"{cure}, or to null if the field is not needed")
                if row[name] is None and name in required:
                    raise ValueError(f"{where}: the field {source!r} is null; {cure}")
                if name in COLUMNS and source != name:
                    row.pop(source, None)  # media are large, and would be in the row twice
            if apply_schema is not None:
                try:
                    row = apply_schema(row)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}; see {key}.schema") from error
            with prefixed(f"{where}: "):
                check_names(row)
                row = normalize_media(row, folder)
            for field in required:
                cure = f"name it with +{key}.columns.{field}=<name in the data>"
                require(row, field, where, cure)
                if field in FIELDS:
                    check_text(row[field], field, where, cure)
            return row

        return convert

    return converter


def find(row: Mapping[str, Any], name: str, where: str, cure: str) -> Any:
    """The field of that name; a name with dots is a path through nested fields.

    Raises:
        ValueError: the row has no such field.
    """
    if name in row or "." not in name:
        return _get(row, name, name, where, cure)
    value: Any = row
    for step in name.split("."):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: no field {name!r} (the value before {step!r} has no fields); {cure}")
        value = _get(value, step, name, where, cure)
    return value


def _get(row: Mapping[str, Any], step: str, name: str, where: str, cure: str) -> Any:
    if step not in row:
        names = [one_line(one, LONGEST_NAME) for one in row]
        known = f"known: {listed(names, FIELDS_SHOWN) or 'none'}{did_you_mean(step, names)}"
        raise ValueError(f"{where}: no field {name!r} ({known}); {cure}")
    return row[step]


def require(row: Mapping[str, Any], field: str, where: str, cure: str) -> None:
    """Raises a ValueError if a row lacks the field, or its value is null or no finite number."""
    value = _get(row, field, field, where, cure)
    if value is None:
        raise ValueError(f"{where}: the field {field!r} is null; {cure}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: the field {field!r} is {value}, as tables write a missing value; {cure}")


def check_text(value: Any, field: str, where: str, cure: str) -> None:
    """Checks a field of `FIELDS`: a text, or a list of chat messages.

    Args:
        field: its name.
        where: the place of the row, for messages.
        cure: ends a message about a value of another type.

    Raises:
        ValueError: it is of another type, empty or longer than `LONGEST`; names the place and the field.
    """
    if isinstance(value, str):
        empty, size = not (value if field == "text" else value.strip()), len(value)
    elif isinstance(value, list) and value:
        with prefixed(f"{where}: "):
            messages = conversation(value, f"the field {field!r}")
        said = [message for message in messages if any(part for name, part in message.items() if name != "role")]
        empty, size = not said, sum(len(text_of(message.get("content"))) for message in messages)
    elif isinstance(value, list):
        empty, size = True, 0
    else:
        raise ValueError(
            f"{where}: the field {field!r} is {type(value).__name__}, not text or a list of chat messages; {cure}"
        )
    if empty and field not in EMPTY_ALLOWED:
        raise ValueError(f"{where}: the field {field!r} is empty; remove the row")
    if size > LONGEST:
        raise ValueError(
            f"{where}: the field {field!r} has {size:,} characters, over {LONGEST:,}; remove the row (a quote that is "
            "not closed joins the rows after it)"
        )
