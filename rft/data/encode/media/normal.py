"""Brings rows with images, audio and video to the normal form of `rft.data.encode.parts`."""

import base64
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from rft.data.encode.media.audio import samples_of
from rft.data.encode.media.files import data_url, file_of, small_file
from rft.data.encode.parts import KINDS, SHOWN, Messages, is_chat, kind_of, map_media
from rft.errors import prefixed

COLUMNS = {f"{kind}{plural}": kind for kind in KINDS for plural in ("", "s")}  # of TRL, verl, OpenRLHF and LLaVA
MESSAGES = ("prompt", "response", "chosen", "rejected", "messages", "completion")  # fields that may have content parts
LONGEST_PATH = 1000  # characters of a path that a message quotes


def normalize_media(row: Mapping[str, Any], folder: Path | None, prompt: str = "prompt") -> dict[str, Any]:
    """A row whose media are content parts with values, without its columns of media, such as `images`.

    The media of a column replace in their order the content parts of the prompt that have their type and no value.
    Without such parts, they replace the markers in its texts, such as `<image>`. Without markers, they stand at the
    beginning of the first message of a user. A prompt that is a text becomes a message of a user.

    Args:
        row: with the fields of this project, after `columns` and `schema`.
        folder: of the file of the row, for relative paths; None if the row is of no file.
        prompt: the field with the prompt.

    Raises:
        ValueError: the prompt has not as many places as there are media, a path is not that of a local file, or a value
            is of an unknown form; names the field.
    """
    normal = {name: value for name, value in row.items() if name not in COLUMNS}
    columns = {}
    for name, kind in COLUMNS.items() if len(normal) < len(row) else ():
        if values := _listed(row.get(name)):
            with prefixed(f"the field {name!r}: "):
                columns[name] = [_value(value, kind, folder) for value in values]
    if columns:
        normal |= _placed(normal, columns, prompt)
    for field in dict.fromkeys((prompt, *MESSAGES)):
        if isinstance(normal.get(field), list) and is_chat(normal[field]):
            with prefixed(f"the field {field!r}: "):
                normal[field] = [_normalized(message, folder) for message in normal[field]]
    return normal


def with_data_urls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with data: URLs, which `normalize_media` reads again, in the place of media that are not files.

    Bytes are unchanged in the URL. Images in memory are drawn, and audio is written, as by `small_file`.

    Args:
        row: in the normal form.
    """

    def url(kind: str, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if kind == "video" and not isinstance(value, bytes):
            return [
                url("image", frame) if isinstance(frame, str | bytes) else data_url(*file_of("image", frame))
                for frame in value
            ]
        made = (value, "") if isinstance(value, bytes) else small_file(kind, value)
        return value if made is None else data_url(*made)

    return map_media(row, url)


def undecoded(features: Any) -> Any:
    """Features of the package datasets that give the path and bytes of media, which it decodes with other packages.

    Args:
        features: `Features` of a table.
    """
    import datasets

    def change(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {name: change(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [change(inner) for inner in feature]
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            return replace(feature, decode=False)
        return replace(feature, feature=change(feature.feature)) if "feature" in vars(feature) else feature

    return datasets.Features(change(dict(features)))


def _placed(row: Mapping[str, Any], columns: dict[str, list[Any]], prompt: str) -> dict[str, Any]:
    """The fields of a row into whose messages the media of its columns are put."""
    field = prompt if row.get(prompt) is not None else "messages"
    value = row.get(field)
    old: Any = [{"role": "user", "content": value}] if isinstance(value, str) else value
    names = " and ".join(map(repr, columns))
    if not is_chat(old):
        raise ValueError(f"{names}: the row has no prompt for the media, a text or chat messages in {prompt!r}")
    if len({COLUMNS[name] for name in columns}) < len(columns):
        raise ValueError(f"the fields {names} are of the same kind; keep one of them")
    new = old
    for name in reversed(columns):  # without markers, each is put before those that were put in
        with prefixed(f"the field {name!r}: "):
            new = _filled(new, COLUMNS[name], columns[name], field)
    placed = {field: new}
    if is_chat(row.get("messages")):  # a schema gives both fields the same messages
        changed = {id(message): filled for message, filled in zip(old, new, strict=True)}
        placed["messages"] = [changed.get(id(message), message) for message in row["messages"]]
    return placed


def _filled(messages: Messages, kind: str, values: list[Any], field: str) -> Messages:
    """Messages with the values of a column at their places."""
    if not _places(messages, kind):
        messages = [_split_at_markers(message, kind) for message in messages]
    if not _places(messages, kind):
        messages = _with_first_places(messages, kind, len(values), field)
    if (places := _places(messages, kind)) != len(values):
        raise ValueError(
            f"it has {len(values)} media, and the field {field!r} has {places} places for them (<{kind}>); these "
            "numbers must be equal"
        )
    left = iter(values)
    filled = []
    for message in messages:
        parts = [{"type": kind, kind: next(left)} if _is_open(part, kind) else part for part in _parts(message)]
        filled.append(message | {"content": parts} if _places([message], kind) else message)
    return filled


def _places(messages: Messages, kind: str) -> int:
    """The number of content parts of a kind that have no value."""
    return sum(_is_open(part, kind) for message in messages for part in _parts(message))


def _is_open(part: Any, kind: str) -> bool:
    return kind_of(part) == kind and [name for name, value in part.items() if value is not None] == ["type"]


def _with_first_places(messages: Messages, kind: str, count: int, field: str) -> Messages:
    """Messages with places for media at the beginning of the first message of a user."""
    if any(kind_of(part) == kind for message in messages for part in _parts(message)):
        raise ValueError(
            f"the field {field!r} has content parts of this kind, with values; remove these, or this field"
        )
    users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise ValueError(f"the field {field!r} has no place for it: neither <{kind}> nor a message of a user")
    asked = messages[users[0]]
    asked = asked | {"content": [{"type": kind}] * count + _parts(asked)}
    return [*messages[: users[0]], asked, *messages[users[0] + 1 :]]


def _split_at_markers(message: dict[str, Any], kind: str) -> dict[str, Any]:
    """A message with a part without a value for each marker in its texts."""
    marker, parts = f"<{kind}>", []
    for part in _parts(message):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or marker not in text:
            parts.append(part)
            continue
        for number, piece in enumerate(text.split(marker)):
            parts += [{"type": kind}] * bool(number) + [{"type": "text", "text": piece}] * bool(piece)
    return message | {"content": parts} if any(_is_open(part, kind) for part in parts) else message


def _parts(message: Mapping[str, Any]) -> list[Any]:
    """The content of a message as parts; the result of a tool may be of another type, and has none."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def _normalized(message: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [_normalized_part(part, folder) for part in content]}


def _normalized_part(part: Any, folder: Path | None) -> Any:
    """A content part in the normal form; one that is not of media is unchanged."""
    kind = kind_of(part)
    if kind is None:
        return part
    name = part["type"]
    given = {key: value for key, value in part.items() if value is not None and key != "type"}
    if not given:
        raise ValueError(
            f"a content part of type {name!r} has no value, and the row has no field {kind}s that gives it"
        )
    keys = (name, "url", "path", "base64")  # those of transformers
    if len(given) > 1 or not given.keys() <= {*keys}:
        raise ValueError(
            f"a content part of type {name!r} has the keys {', '.join(given)}; give its value as one of "
            f"{', '.join(keys)}, without other keys"
        )
    [(key, value)] = given.items()
    return {"type": kind, kind: _from_base64(value) if key == "base64" else _value(value, kind, folder)}


def _value(value: Any, kind: str, folder: Path | None) -> Any:
    """A value in the normal form, of a file or of a struct of the package datasets or of OpenAI."""
    if isinstance(value, Mapping):
        given = {key: inner for key, inner in value.items() if inner is not None}
        if kind == "audio" and "array" in given and isinstance(given.get("sampling_rate"), int):
            return {"array": samples_of(given["array"]), "sampling_rate": given["sampling_rate"]}
        if "data" in given:
            return _from_base64(given["data"])
        if kind == "video" and given.keys() == {"type", kind} and given["type"] == kind:  # as verl writes it
            return _value(given[kind], kind, folder)
        value = next((given[key] for key in ("bytes", "url", "path") if given.get(key)), value)
    if isinstance(value, str | Path):
        return _from_place(str(value), folder)
    if isinstance(value, bytes) and value:
        return value
    if kind != "audio" and (isinstance(value, np.ndarray) or type(value).__module__.startswith("PIL.")):
        return value
    if kind == "video" and isinstance(value, list | tuple) and value:
        return [_value(frame, "image", folder) for frame in value]
    shown = f"a value with the keys {', '.join(value)}" if isinstance(value, Mapping) else repr(value)
    array = {"audio": "{array, sampling_rate}", "video": "an array, or a list of images"}.get(kind, "an array")
    raise ValueError(f"{shown:.{SHOWN}} is no {kind}: give a path, bytes, {{bytes, path}}, a data: URL, or {array}")


def _from_place(place: str, folder: Path | None) -> str | bytes:
    """The absolute path of a path or file: URL, or the bytes of a data: URL."""
    if place.startswith("data:"):
        head, _, data = place.partition(",")
        if not head.endswith(";base64"):
            raise ValueError(f"{place!r:.{SHOWN}} is a data: URL without base64; write data:<type>;base64,<data>")
        return _from_base64(data)
    if place.startswith("file:"):
        path = Path(unquote(urlsplit(place).path))
    elif "://" in place:
        raise ValueError(
            f"{place!r:.{SHOWN}} is not a local file, and the run downloads none; download it first, and give its path"
        )
    else:
        path = Path(place).expanduser()
    if folder is None and not path.is_absolute():
        raise ValueError(f"{place!r:.{SHOWN}} is a relative path, and the row is of no folder; give an absolute path")
    path_of_file = os.path.abspath(path if folder is None else folder / path)
    if not os.path.isfile(path_of_file):
        raise ValueError(f"there is no file {path_of_file:.{LONGEST_PATH}}; correct the path {place!r:.{SHOWN}}")
    return path_of_file


def _from_base64(data: Any) -> bytes:
    try:
        content = base64.b64decode("".join(data.split()), validate=True) if isinstance(data, str) else b""
    except ValueError as error:
        raise ValueError(f"{data!r:.{SHOWN}} is not base64 ({error})") from error
    if not content:
        raise ValueError(f"{data!r:.{SHOWN}} is not base64 of one byte or more")
    return content


def _listed(value: Any) -> list[Any]:
    """The media of a column, which has one or a list of them; a table writes a missing one as null or without keys."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None or (isinstance(value, str | Mapping) and not value) else [value]
