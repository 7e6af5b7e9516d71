"""Schemas of question sets: instructions around a question, and the choices of a multiple-choice question."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

from rft.data.rows.schemas import SCHEMAS, Row
from rft.ranges import Seed

PLACEHOLDER = re.compile(r"\{(prompt|choices|letters)\}")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
