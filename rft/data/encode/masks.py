"""Finds the trained parts of a conversation in one rendering of all its messages, for any chat template."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rft.data.encode.parts import KINDS
from rft.data.encode.templates import Messages

Render = Callable[[Messages, bool], str]
# Keys of a message of the assistant that say whether it trains: of OpenAI, of verl, and of axolotl and others.
MARKS = ("weight", "loss_mask", "train", "loss", "trainable")
# Why a conversation has nothing to train on.
REWRITTEN = (
    "the template rewrites its last answer or the text before it, such as a thought that the generation prompt begins "
    "and the template then drops; give the answer as a text, which trains unchanged, or the path of a template that "
    "keeps answers"
)
NO_ANSWER = "no message is an answer of the assistant that trains; remove the row"


class Turn(NamedTuple):
    """A turn of the assistant in the render of a conversation: the characters [start, end)."""

    start: int
    end: int


def answers(
    render: Render, length: Callable[[str], int], messages: Messages, first: int
) -> tuple[str, list[Turn | None]]:
    """Renders a conversation once, and finds the assistant's turns in it.

    Let A be the prompt that sampling would read before the turn, and B the turn as the template renders it when it is
    the last message, up to its end token. The turn is unchanged if the rendering begins with A + B. Otherwise the
    template has rewritten the turn or the text before it: templates of thinking models drop earlier thoughts, and some
    move the system message to the last question. Such a turn must not train, because the model never reads or writes
    this text.

    Args:
        render: renders messages; True adds the generation prompt.
        length: characters of a turn, up to the end of its end token.
        first: index of the first message that may train.

    Returns:
        The text, and one entry per turn of the assistant that follows another role's message and is not marked as one
        that does not train: its place, or None if the template rewrote it.

    Raises:
        ValueError: a mark has an unknown value.
    """
    text = render(messages, False)
    turns: list[Turn | None] = []
    for number, message in enumerate(messages):
        asked = any(earlier["role"] not in ("system", "assistant") for earlier in messages[:number])
        if number < first or message["role"] != "assistant" or not asked or not is_trained(message):
            continue
        prompt = render(messages[:number], True)
        alone = text if number == len(messages) - 1 else render(messages[: number + 1], False)
        turn = None
        if alone.startswith(prompt):
            end = len(prompt) + length(alone[len(prompt) :])
            turn = Turn(len(prompt), end) if text.startswith(alone[:end]) else None
        turns.append(turn)
    return text, turns


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message of the assistant trains: 0 or false in one of `MARKS` takes it out.

    Raises:
        ValueError: a mark has another value than 0, 1, true or false, or two of them differ.
    """
    marks = {name: message[name] for name in MARKS if name in message}
    shown = ", ".join(f"{name}={value!r:.20}" for name, value in marks.items())
    if any(value not in (0, 1) for value in marks.values()):
        raise ValueError(
            f"a message of the assistant has {shown}: a mark is 0 or false, which takes it out, or 1 or true"
        )
    if len(set(map(bool, marks.values()))) > 1:
        raise ValueError(f"a message of the assistant has {shown}, which differ; keep one of the marks")
    return all(marks.values())


def check_unmarked(messages: Messages) -> None:
    """Raises ValueError where a message of the assistant is marked as one that does not train, and all tokens do."""
    if not all(is_trained(message) for message in messages if message["role"] == "assistant"):
        raise ValueError(
            "data.train_on=all trains every token, and an answer of this row is marked as one that does not train "
            f"({', '.join(MARKS)}); set data.train_on=assistant, or remove the mark"
        )


def conversation(value: Any, what: str) -> list[dict[str, Any]]:
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
