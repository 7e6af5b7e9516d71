"""Media as bytes of files: beside the rows of a jsonl file, and in OpenAI's messages to a server."""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rft.data.encode.media_files import file_of
from rft.data.encode.parts import Messages, media_of
from rft.logger.media import FORMATS


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
    text = base64.b64encode(data).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": text, "format": suffix}}
    return {"type": "image_url", "image_url": {"url": f"data:{FORMATS[suffix]};base64,{text}"}}


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Writes rows as a jsonl file, and their media as files in a folder of its name beside it; returns their number.

    Args:
        rows: with media in the `prompt`, in the normal form; their other fields are JSON.
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
            file.write(json.dumps({**row, "prompt": prompt}, ensure_ascii=False) + "\n")
    return count


def _named(content: Any, names: Iterator[str]) -> Any:
    """A content whose media are the next of these names."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": part["type"], part["type"]: next(names)} for part in content]
