"""Chat messages, whose contents are texts, or lists of parts: texts, and images, audio or video with their values.

A content part of the normal form is `{type: text, text: ...}` or `{type: <kind>, <kind>: value}`, as in chat templates
of transformers. A value is an absolute path, the bytes of a file, a PIL image or an array (H, W, 3) of uint8; of audio,
instead of the last two, `{array, sampling_rate}` with an array (N,) of float32; of video, an array (frames, H, W, 3) of
uint8 or a list of images.
"""

from collections.abc import Callable, Mapping, Sequence
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


def asked(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the assistant's messages that follow a message of another role, such as a question."""
    roles = [message["role"] for message in messages]
    first = next((number for number, role in enumerate(roles) if role not in ("system", "assistant")), len(roles))
    return [number for number, role in enumerate(roles) if role == "assistant" and number > first]


def join(question: Messages, answer: Messages) -> tuple[Messages, Messages, dict[str, Any] | None]:
    """Prompt and response, and the message of the assistant that the prompt ends with and the response continues.

    The prompt is returned without it, and the first message of the response with it. Without such a message both are
    returned as they are, and None.

    Raises:
        ValueError: the content of one of the two is not a text.
    """
    if not question or not question[-1]["role"] == answer[0]["role"] == "assistant":
        return question, answer, None
    *question, start = question
    contents = [message["content"] for message in (start, answer[0]) if isinstance(message.get("content"), str)]
    if len(contents) < 2:
        raise ValueError(
            "the prompt ends with a message of the assistant, which the response continues: the contents of both must "
            "be texts; move the message to the response if it is an answer of its own"
        )
    return question, [{**start, **answer[0], "content": "".join(contents)}, *answer[1:]], start


def conversation(value: Any, what: str) -> Messages:
    """Chat messages without the nulls that tables fill in for keys of other rows.

    A content is one text, or a list of parts if one of them is not a text.

    Args:
        what: what error messages call the messages.

    Raises:
        ValueError: `value` is not a list of messages with a role, or a content is not text.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} is {type(value).__name__ if value != [] else 'empty'}, not a list of chat messages")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {number} of {what} is {message!r:.200}; expected {{role: user, content: ...}} (map other "
                "schemas where the rows are loaded)"
            )
        kept = {key: part for key, part in message.items() if part is not None or key == "content"}
        if isinstance(kept.get("content"), list):  # OpenAI's content parts
            parts = [_checked(part, number, what) for part in kept["content"]]
            texts = all(part["type"] == "text" for part in parts)
            kept["content"] = "".join(part["text"] for part in parts) if texts else parts
        elif not isinstance(kept.get("content"), str | None) and kept["role"] != "tool":  # a result may be an object
            raise ValueError(
                f"the content of message {number} of {what} is {type(kept['content']).__name__}; write it as a text"
            )
        messages.append(kept)
    return messages


def _checked(part: Any, number: int, what: str) -> dict[str, Any]:
    """A content part `{type, <type>: value}`."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in KINDS and part.get(kind) is not None:
        return {"type": kind, kind: part[kind]}
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise ValueError(
        f"message {number} of {what} has a content part of type {kind!r:.60} without a value, or of an unknown type; "
        f"expected one of text, {', '.join(KINDS)}"
    )


def no_prompt(prompt: Any, what: str) -> ValueError:
    """The error of a prompt that is neither a text nor a list."""
    return ValueError(
        f"{what} is {type(prompt).__name__}, not text or a list of chat messages; name another field in "
        "columns.prompt of the data set"
    )
