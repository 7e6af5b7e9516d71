"""Chat messages whose contents are lists of parts: texts, and images, audio or video with their values.

A content part of the normal form is `{type: text, text: ...}` or `{type: <kind>, <kind>: value}`, as in chat templates
of transformers. A value is an absolute path, the bytes of a file, a PIL image or an array (H, W, 3) of uint8; of audio,
instead of the last two, `{array, sampling_rate}` with an array (N,) of float32; of video, an array (frames, H, W, 3) of
uint8 or a list of images.
"""

from collections.abc import Callable, Mapping
from typing import Any

Messages = list[dict[str, Any]]

KINDS = ("image", "audio", "video")
TYPES = {f"{kind}{url}": kind for kind in KINDS for url in ("", "_url")} | {"input_audio": "audio"}  # also of OpenAI
SHOWN = 120  # characters of a value, and of a row, in a message


def media_of(messages: Any) -> list[tuple[str, Any]]:
    """The kind and value of each of the media in chat messages of the normal form, in their order; none in a text."""
    contents = [message.get("content") for message in messages] if is_chat(messages) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [(part["type"], part[part["type"]]) for part in parts if kind_of(part) in KINDS]


def has_parts(value: Any) -> bool:
    """Whether a value is chat messages with media."""
    return bool(media_of(value))


def text_of(content: Any) -> str:
    """The text of a message's content, without its media."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return str(content)


def map_media(row: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A row with `change(kind, value)` in the place of each medium's value in its chat messages.

    Args:
        row: in the normal form; values of media in another form may be in fields that `normalize_media` does not read.
        change: returns the value itself where it is not changed.
    """

    def changed(part: Any) -> Any:
        kind = kind_of(part)
        return {**part, kind: change(kind, part[kind])} if kind is not None and kind in part else part

    def message(found: Any) -> Any:
        content = found.get("content")
        return found | {"content": [changed(part) for part in content]} if isinstance(content, list) else found

    return {name: [message(m) for m in value] if is_chat(value) else value for name, value in row.items()}


def kind_of(part: Any) -> str | None:
    """The kind of a content part of media; None of another part."""
    name = part.get("type") if isinstance(part, Mapping) else None
    return TYPES.get(name) if isinstance(name, str) else None


def is_chat(value: Any) -> bool:
    """Whether a value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def beginning(prompt: Any) -> str:
    """The beginning of a prompt, or of its last message, for messages."""
    return str(prompt[-1]["content"] if isinstance(prompt, list) else prompt)[:SHOWN]
