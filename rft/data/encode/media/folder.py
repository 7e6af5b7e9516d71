"""Media as files: small ones of a run for people, those beside rows of a jsonl file, and their bytes for servers."""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.batch.trajectory import plain_fields
from rft.data.encode.media.files import data_url, file_of, small_file
from rft.data.encode.parts import Messages, map_media, media_of
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


def openai_messages(messages: Messages) -> Messages:
    """Chat messages whose media are content parts of OpenAI: `image_url` with a data: URL, and `input_audio`.

    Args:
        messages: in the normal form; contents that are texts stay unchanged.

    Raises:
        ValueError: as `file_of`, or a part is video.
    """
    return [
        message | {"content": [_openai_part(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _openai_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return dict(part)
    if kind == "video":
        raise ValueError("video is not sent to servers; remove the part, or the row")
    data, suffix = file_of(kind, part[kind])
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": suffix}}
    return {"type": "image_url", "image_url": {"url": data_url(data, suffix)}}


def write_rows(rows: Iterable[Mapping[str, Any]], fields: Sequence[str], path: Path) -> int:
    """Writes rows as a jsonl file, and their media as files in a folder of its name beside it; returns their number.

    Args:
        rows: with media in the `prompt`, in the normal form.
        fields: that are written, `prompt` and others, which are JSON.
        path: of the jsonl file; folders are made.

    Raises:
        ValueError: as `file_of`.
    """
    folder, count = path.with_suffix(""), 0
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            prompt, names = row["prompt"], []
            for number, (kind, value) in enumerate(media_of(prompt)):
                data, suffix = file_of(kind, value)
                names.append(f"{folder.name}/{count}-{number}.{suffix}")
                (path.parent / names[-1]).write_bytes(data)
            left = iter(names)
            if names:
                prompt = [message | {"content": _named(message["content"], left)} for message in prompt]
            written = {field: row[field] for field in fields} | {"prompt": prompt}
            file.write(json.dumps(written, ensure_ascii=False) + "\n")
    return count


def _named(content: Any, names: Iterator[str]) -> Any:
    """A content whose media are the next of these names."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": part["type"], part["type"]: next(names)} for part in content]
