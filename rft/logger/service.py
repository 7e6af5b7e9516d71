"""What the loggers of tracking services share: a check of the package, the id of a run, the table of texts."""

import importlib.util
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rft.logger.media import media_files

COMPLETIONS = "completions"  # the key of the table, as TRL names it


def check_package(name: str) -> None:
    """Raises a ValueError if the package of `logger=<name>`, which is an extra of the same name, is missing."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"logger={name}: the package {name} is not installed; pip install 'rft[{name}]'")


def run_id(run: Path, service: str) -> str:
    """The id of a run folder at a service. It lies in `<run>/<service>_id`, so a resumed run has the same one."""
    note = run / f"{service}_id"
    if not note.exists():
        note.write_text(secrets.token_hex(4), encoding="utf-8")
    return note.read_text(encoding="utf-8").strip()


def completions_table(step: int, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows of the sampled texts of a step.

    Columns are `step` and every key of a row. A cell without a value is None; a list or an object becomes JSON text.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return ["step", *names], [[step, *(_cell(row.get(name)) for name in names)] for row in rows]


def table_with_media(
    step: int, rows: Sequence[Mapping[str, Any]], run: Path, package: ModuleType
) -> tuple[list[str], list[list[Any]]]:
    """`completions_table` with further columns for media, of objects of the package, named by their kind and number.

    Args:
        run: the run folder, which has the files.
        package: of the service; see `MediaFile.wrapped`.
    """
    columns, data = completions_table(step, rows)
    cells: list[dict[str, Any]] = []  # of each row, by the name of the column
    for row in rows:
        found: dict[str, Any] = {}
        for file in media_files(dict(row), run):
            number = 1 + sum(name.startswith(f"{file.kind} ") for name in found)
            found[f"{file.kind} {number}"] = file.wrapped(package)
        cells.append(found)
    names = sorted({name for found in cells for name in found})
    return [*columns, *names], [
        [*row, *(found.get(name) for name in names)] for row, found in zip(data, cells, strict=True)
    ]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
