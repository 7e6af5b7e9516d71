"""Rows of questions about generated media. Train and held-out sets share no media.

Every row has one right answer and one wrong answer, the next one of the possible answers. A share of the demonstrations
names both, "red or green", which is no right answer. As in `Symbolic`, a model that imitates demonstrations learns the
task as the rarer of two behaviours, which reinforcement learning then makes more frequent.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rft.data.rows.lazy import LazyRows, Row

Split = Literal["train", "heldout"]
FIELDS = (
    *("prompt", "answer", "response", "demonstration", "chosen", "rejected", "completion", "label"),
    *("completions", "labels"),
)
HELD_OUT = 10  # the media of one of ten rows are held out, by their checksum


@dataclass(frozen=True)
class Asked:
    """A question about media that are not drawn yet.

    Attributes:
        media: describes the media; their content parts are made from it.
        question: the text after the media.
        answer: the right answer.
        wrong: another answer.
    """

    media: tuple[Any, ...]
    question: str
    answer: str
    wrong: str


def following(answers: Sequence[str], answer: str) -> str:
    """The wrong answer: the next one in the list, after the last one the first."""
    return answers[(list(answers).index(answer) + 1) % len(answers)]


def in_split(what: Any, split: Split) -> bool:
    """Whether media belong to the training rows or to the held-out ones, by the checksum of what describes them."""
    return (zlib.crc32(repr(what).encode()) % HELD_OUT == 0) == (split == "heldout")


def rows_of(
    key: str,
    ask: Callable[[random.Random], Asked],
    parts: Callable[[Any], list[dict[str, Any]]],
    count: int,
    slips: float,
    seed: int,
    required: Sequence[str],
) -> LazyRows:
    """Draws questions. The media are made whenever a row is indexed, so that they take no memory.

    Args:
        key: the yaml key of the rows.
        ask: draws a question.
        parts: makes the content parts of the media of a question, the same ones in every call.
        count: number of rows, all different.
        slips: share of the demonstrations that name the wrong answer after the right one.
        seed: seed of the questions.
        required: fields that the run reads.

    Raises:
        ValueError: a required field does not exist.
    """
    for field in required:
        if field not in FIELDS:
            raise ValueError(f"{key}: the built-in tasks have no field {field!r}; name another field")
    rng = random.Random(seed)
    asked: dict[Asked, bool] = {}
    while len(asked) < count:
        asked.setdefault(ask(rng), rng.random() < slips)
    drawn = list(asked.items())

    def read(number: int) -> Row:
        one, slip = drawn[number]
        content = [*parts(one.media), {"type": "text", "text": one.question}]
        good = zlib.crc32(repr(one).encode()) % 2 == 0
        judged = one.answer if good else one.wrong
        right = [one.answer.startswith(judged[: place + 1]) for place in range(len(judged))]
        shown = f"{one.answer} or {one.wrong}" if slip else one.answer
        prompt = [{"role": "user", "content": content}]
        values = (prompt, one.answer, one.answer, shown, one.answer, one.wrong, judged, good, list(judged), right)
        return dict(zip(FIELDS, values, strict=True))

    return LazyRows(len(drawn), read)
