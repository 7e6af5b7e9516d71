"""Media as bytes of files: beside the rows of a jsonl file, and in OpenAI's messages to a server."""

import base64
import io
import json
import wave
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rft.data.encode.media_files import DAMAGED, open_media
from rft.data.encode.parts import Messages, media_of

SOUNDS = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg"}  # the format of a file by its first bytes; else mp3


def encoded(kind: str, value: Any) -> tuple[str, bytes]:
    """The format, such as "png" or "wav", and the bytes of a file with an image or audio; those of a file as they are.

    Args:
        kind: "image" or "audio".
        value: in the normal form; an image of PIL and an array become PNG, `{array, sampling_rate}` becomes WAV.

    Raises:
        ValueError: a file cannot be read, or its format is unknown.
    """
    if isinstance(value, str):
        try:
            value = Path(value).read_bytes()
        except OSError as error:
            raise ValueError(f"{value} cannot be read ({error}); replace it, or remove the row") from error
    if isinstance(value, bytes):
        return (SOUNDS.get(value[:4], "mp3") if kind == "audio" else _image_format(value)), value
    file = io.BytesIO()
    if kind == "audio":
        with wave.open(file, "wb") as written:
            written.setparams((1, 2, value["sampling_rate"], 0, "NONE", ""))
            written.writeframes((value["array"] * 2**15).round().clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
        return "wav", file.getvalue()
    open_media(kind, value).save(file, "png")
    return "png", file.getvalue()


def _image_format(value: bytes) -> str:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(value)) as opened:
            return str(opened.format).lower()
    except DAMAGED as error:
        raise ValueError(
            f"a file of {len(value):,} bytes cannot be read as an image ({error}); replace it, or remove the row"
        ) from error


def openai_messages(messages: Messages) -> Messages:
    """Chat messages whose media are content parts of OpenAI: `image_url` with a data: URL, and `input_audio`.

    Args:
        messages: in the normal form; contents that are texts stay unchanged.

    Raises:
        ValueError: as `encoded`, or a part is video.
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
    form, data = encoded(kind, part[kind])
    text = base64.b64encode(data).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": text, "format": form}}
    return {"type": "image_url", "image_url": {"url": f"data:image/{form};base64,{text}"}}


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Writes rows as a jsonl file, and their media as files in a folder of its name beside it; returns their number.

    Args:
        rows: with media in the `prompt`, in the normal form; their other fields are JSON.
        path: of the jsonl file; folders are made.

    Raises:
        ValueError: as `encoded`.
    """
    folder, count = path.with_suffix(""), 0
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            prompt, names = row["prompt"], []
            for number, (kind, value) in enumerate(media_of(prompt)):
                form, data = encoded(kind, value)
                names.append(f"{folder.name}/{count}-{number}.{form}")
                (path.parent / names[-1]).write_bytes(data)
            left = iter(names)
            if names:
                prompt = [message | {"content": _named(message["content"], left)} for message in prompt]
            file.write(json.dumps({**row, "prompt": prompt}, ensure_ascii=False) + "\n")
    return count


def _named(content: Any, names: Iterator[str]) -> Any:
    """A content whose media are the next of these names."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": part["type"], part["type"]: next(names)} for part in content]
