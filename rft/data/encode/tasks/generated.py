"""Rows of questions about generated media. Train and held-out sets share no media.

Every row has one right answer and one wrong answer, the next one of the possible answers. A share of the demonstrations
names both, "red or green", which is no right answer. As in `Symbolic`, a model that imitates demonstrations learns the
task as the rarer of two behaviours, which reinforcement learning then makes more frequent.
"""

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rft.data.rows import symbolic
from rft.data.rows.lazy import LazyRows, Row

Split = Literal["train", "heldout"]
FIELDS = tuple(field for field in symbolic.FIELDS if field != "text")


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
    return (zlib.crc32(repr(what).encode()) % symbolic.HELD_OUT == 0) == (split == "heldout")


class MediaRows(ABC):
    """Rows of questions about generated media.

    Attributes:
        key, count, slips, seed: options of the classes of rows.
    """

    key: str
    count: int
    slips: float
    seed: int

    @abstractmethod
    def ask(self, rng: random.Random) -> Asked:
        """Draws a question."""

    @abstractmethod
    def parts(self, media: Any) -> list[dict[str, Any]]:
        """Makes the content parts of the media of a question, the same ones in every call."""

    def load(self, required: Sequence[str]) -> LazyRows:
        """Draws the rows. Their media are made whenever a row is indexed, so that they take no memory.

        Raises:
            ValueError: a required field does not exist.
        """
        for field in required:
            if field not in FIELDS:
                raise ValueError(f"{self.key}: the built-in tasks have no field {field!r}; name another field")
        rng = random.Random(self.seed)
        asked: dict[Asked, bool] = {}
        while len(asked) < self.count:
            asked.setdefault(self.ask(rng), rng.random() < self.slips)
        drawn = list(asked.items())
        return LazyRows(len(drawn), lambda number: self._row(*drawn[number]))

    def _row(self, asked: Asked, slip: bool) -> Row:
        answer, wrong = asked.answer, asked.wrong
        content = [*self.parts(asked.media), {"type": "text", "text": asked.question}]
        good = zlib.crc32(repr(asked).encode()) % 2 == 0
        judged = answer if good else wrong
        right = [answer.startswith(judged[: place + 1]) for place in range(len(judged))]
        shown = f"{answer} or {wrong}" if slip else answer
        prompt = [{"role": "user", "content": content}]
        values = (prompt, answer, answer, shown, answer, wrong, judged, good, list(judged), right)
        return dict(zip(FIELDS, values, strict=True))
