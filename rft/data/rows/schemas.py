"""Converts rows of known formats to the fields of this project: prompt, response, chosen, rejected.

A schema is a function from a row to a row. Prompts and responses are texts or lists of chat messages
`{role, content}`.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rft.registry import Registry

SCHEMAS = Registry("schema")
Row = dict[str, Any]
Messages = list[dict[str, Any]]


@SCHEMAS.register("messages")
def messages(row: Row) -> Row:
    """The formats of TRL: `messages`; `prompt` and `completion`; `chosen` and `rejected`, with `prompt` or without.

    The last of `messages` is the response if its role is assistant, with messages of the assistant right before it;
    otherwise all of them are the prompt. Without a field `prompt`, the messages or words with which both `chosen` and
    `rejected` begin are the prompt.

    Raises:
        ValueError: there is no message to answer, or `chosen` and `rejected` answer different prompts.
    """
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return row | _pair(row["chosen"], row["rejected"], row.get("prompt"))
    if row.get("messages") is not None:
        return row | _dialogue(_turns(row["messages"], "messages"))
    if row.get("completion") is not None:
        return row | {"response": row["completion"]}
    return row


@SCHEMAS.register("sharegpt")
def sharegpt(row: Row, *, roles: dict[str, str]) -> Row:
    """`conversations` of `{from, value}`, and an optional text `system`.

    They become `messages`, with prompt and response as in `messages`. `chosen` and `rejected`, one turn each, answer
    the whole conversation.

    Args:
        roles: {value of `from`: role of a chat message}.

    Raises:
        ValueError: the row has no turns, or `roles` lacks a speaker; or as in `messages`.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"conversations: expected a list of turns {{from, value}}, got {turns!r:.80}")
    dialogue = [_message(turn, roles) for turn in turns]
    if row.get("system"):
        dialogue = [{"role": "system", "content": row["system"]}, *dialogue]
    rest = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    pair = {name: [_message(row[name], roles)] for name in ("chosen", "rejected") if row.get(name) is not None}
    return rest | ({"prompt": dialogue, **pair} if pair else {"messages": dialogue, **_dialogue(dialogue)})


def _message(turn: Any, roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or "value" not in turn or turn.get("from") not in roles:
        known = ", ".join(roles)
        raise ValueError(f"conversations: expected turns {{from, value}} with from one of {known}; got {turn!r:.80}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": roles[turn["from"]], "content": turn["value"], **others}


def _dialogue(messages: Messages) -> Row:
    """Splits messages into prompt and response: the messages of the assistant that end them."""
    if messages[-1]["role"] != "assistant":
        return {"prompt": messages}
    if all(message["role"] in ("system", "assistant") for message in messages):
        raise ValueError("no message before the assistant's answer is of another role")
    start = _turn_start(messages, len(messages) - 1)
    return {"prompt": messages[:start], "response": messages[start:]}


def _pair(chosen: Any, rejected: Any, prompt: Any) -> Row:
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = _shared_words(chosen, rejected) if prompt is None else prompt
        start = len(shared) if prompt is None else 0
        return {"prompt": shared, "chosen": chosen[start:], "rejected": rejected[start:]}
    chosen, rejected = _turns(chosen, "chosen"), _turns(rejected, "rejected")
    if prompt is not None and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    start = _shared(chosen[:-1], rejected[:-1])
    if not start or {chosen[start]["role"], rejected[start]["role"]} != {"assistant"}:
        raise ValueError("chosen and rejected are not answers to the same messages")
    start = _turn_start(chosen, start)
    return {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}


def _turn_start(messages: Messages, number: int) -> int:
    """The first of the assistant's messages that end with this number: a prompt that ends with one is continued."""
    while number and messages[number - 1]["role"] == "assistant":
        number -= 1
    return number


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common prefix."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _turns(value: Any, field: str) -> Messages:
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return value
    raise ValueError(f"{field}: expected a list of chat messages {{role, content}}, got {value!r:.80}")


def _shared_words(one: str, other: str) -> str:
    """The common prefix of two texts, up to the end of a word."""
    words = re.match(r"(.*\S)\s", one[: _shared(one, other)], re.DOTALL)
    if words is None:
        raise ValueError("chosen and rejected begin with different words, and there is no prompt")
    return words[1]
