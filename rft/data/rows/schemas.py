"""Converts rows of known formats to the fields of this project: prompt, response, chosen, rejected.

A schema is a function from a row to a row. Prompts and responses are texts or lists of chat messages
`{role, content}`. Schemas of question sets put instructions around a question, and write the choices into it.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from rft.ranges import Seed
from rft.registry import Registry

SCHEMAS = Registry("schema")
PLACEHOLDER = re.compile(r"\{(prompt|choices|letters)\}")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
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


def _needs(*names: str) -> Callable[[str], str | None]:
    """The fault of a `text` that lacks one of these placeholders."""

    def fault(text: str) -> str | None:
        found = PLACEHOLDER.findall(text)
        missing = [f"{{{name}}}" for name in names if name not in found]
        return f"text={text!r:.80}: it needs {' and '.join(missing)}" if missing else None

    return fault


@SCHEMAS.register("question", fault=_needs("prompt"))
def question(row: Row, *, text: str, source: str, subject: str | None) -> Row:
    """Puts instructions around the `prompt`, and names the data set of the row.

    Args:
        text: the new prompt, with {prompt} where the old one stands.
        source: the new field `data_source`.
        subject: a field whose value is added to it unless it is empty, as in "math_500/number_theory"; null: none.

    Raises:
        ValueError: the prompt is no text, or the row has no such field.
    """
    return row | {"prompt": _fill(text, prompt=_text(row, "prompt")), "data_source": _source(row, source, subject)}


@SCHEMAS.register("multiple_choice", fault=_needs("prompt", "choices"))
def multiple_choice(
    row: Row, *, text: str, choices: str | list[str], shuffle: Seed | None, source: str, subject: str | None
) -> Row:
    """Writes the choices into the `prompt`, "A) Paris" on a line each, and the letter of the right one as `answer`.

    Args:
        text: the new prompt, with {prompt} and {choices} where question and choices stand, and optionally {letters},
            such as ABCD.
        choices: the field with the list of choices, of which the field `answer` is the letter or the index from 0; or
            the fields with one choice each, the right one first.
        shuffle: seed of a random order of the choices, which depends on seed and question alone; null: their order in
            the data.
        source, subject: as in `question`.

    Raises:
        ValueError: a field is missing, the choices are no 2 to 26 texts, or the answer is none of them.
    """
    asked = _text(row, "prompt")
    options, right = _options(row, choices)
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"a question needs 2 to {len(LETTERS)} choices, and there are {len(options)}; remove the row")
    letters = LETTERS[: len(options)]
    order = list(range(len(options)))
    if shuffle is not None:
        order.sort(key=lambda number: hashlib.blake2b(f"{shuffle} {number} {asked}".encode()).digest())
    listed = "\n".join(f"{letter}) {options[number]}" for letter, number in zip(letters, order, strict=True))
    return row | {
        "prompt": _fill(text, prompt=asked, choices=listed, letters=letters),
        "answer": letters[order.index(right)],
        "data_source": _source(row, source, subject),
    }


def _options(row: Row, choices: str | list[str]) -> tuple[list[str], int]:
    """The texts of the choices, and the index of the right one."""
    if isinstance(choices, list):
        return [_text(row, name) for name in choices], 0
    options = _field(row, choices)
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ValueError(f"the field {choices!r} is no list of texts: {options!r:.80}")
    answer = _field(row, "answer")
    if isinstance(answer, str):
        right = LETTERS.find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
    else:
        right = -1 if isinstance(answer, bool) or not isinstance(answer, int) else answer
    if not 0 <= right < len(options):
        raise ValueError(f"the field 'answer' is {answer!r:.80}, and not the letter or index of a choice")
    return [option.strip() for option in options], right


def _source(row: Row, source: str, subject: str | None) -> str:
    name = "" if subject is None else re.sub(r"\W+", "_", str(_field(row, subject)).lower()).strip("_")
    return f"{source}/{name}" if name else source


def _fill(text: str, **values: str) -> str:
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def _text(row: Row, name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} is no text: {value!r:.80}")
    return value.strip()


def _field(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"no field {name!r} (known: {', '.join(row)})")
    return row[name]
