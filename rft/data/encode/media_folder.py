"""Writes the media of rows as small files for people, each once, and rows that name the files."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rft.batch.trajectory import plain_fields
from rft.data.encode.media_files import small_file
from rft.data.encode.parts import map_media
from rft.logger.disk import make_folder, replacing
from rft.logger.media import MEDIA

DIGITS = 16  # of the hash in a name


Make = Callable[[str, Any], tuple[bytes, str] | None]  # of kind and value, the content and the suffix of a file


def store_media(row: Mapping[str, Any], run: Path, folder: Path, make: Make = small_file) -> dict[str, Any]:
    """A row that JSON can hold: the media in its chat messages are files of `<run>/media`, named by their paths.

    A file is named by the hash of its content, so each is written once. Of other objects that JSON cannot hold, the row
    has the names of their classes.

    Args:
        row: in the normal form of `rft.data.encode.parts`, maybe with data: URLs.
        run: the folder that has `media/`.
        folder: of the file for which the row is made; the paths are relative to it.
        make: what is written of a medium, `small_file` or `whole_file`; where it returns None, the value is unchanged.

    Raises:
        ValueError: a medium is damaged; names it.
    """

    def stored(kind: str, value: Any) -> Any:
        if (made := make(kind, value)) is None:
            return value
        path = run / MEDIA / _name(*made)
        if not path.exists():
            make_folder(path.parent)
            with replacing(path) as partial:
                partial.write_bytes(made[0])
        return os.path.relpath(path, folder)

    plain: dict[str, Any] = plain_fields(map_media(row, stored))
    return plain


def name_media(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the names of the files that `store_media` writes: equal media have equal names, and so have the files.

    Args:
        row: as in `store_media`.
    """

    def named(kind: str, value: Any) -> Any:
        made = small_file(kind, value)
        return value if made is None else _name(*made)

    return map_media(row, named)


def _name(data: bytes, suffix: str) -> str:
    return f"{hashlib.sha256(data).hexdigest()[:DIGITS]}.{suffix}"
