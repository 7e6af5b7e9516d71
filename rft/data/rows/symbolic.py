"""The built-in tasks: generated short texts with one right answer. Train and held-out sets share no prompt.

Besides its right answer every row has a demonstration, which often repeats the digits unchanged. A model that imitates
demonstrations learns the form of an answer, and the task as the rarer of two behaviours, which reinforcement learning
then makes more frequent.
"""

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from rft.conditions import ReadWith
from rft.ranges import Fraction, PositiveInt, Range, Seed

TASKS: dict[str, Callable[[str], str]] = {
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "add": lambda digits: str(sum(int(digit) for digit in digits)),
}
FIELDS = (
    *("prompt", "answer", "response", "demonstration", "chosen", "rejected", "completion", "label", "text"),
    *("completions", "labels"),
)
PRODUCT_FIELDS = ("prompt", "answer", "demonstration")
HELD_OUT = 10  # one of ten prompts is held out, by its checksum


class Generated(ABC):
    """Rows that are drawn until there are enough different ones.

    Attributes:
        key, split, count, slips, seed: options of the classes of rows.
        fields: of a row.
        more: ends the message that there are too few different prompts.
    """

    key: str
    split: str
    count: int
    slips: float
    seed: int
    fields: ClassVar[tuple[str, ...]]
    more: ClassVar[str]

    @abstractmethod
    def draw(self, rng: random.Random) -> str:
        """What a row is about; rows that are about the same text are one row."""

    @abstractmethod
    def row(self, text: str, rng: random.Random) -> dict[str, Any]:
        """The row that is about a text."""

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """Draws the rows."""
        rng, rows = random.Random(self.seed), dict[str, dict[str, Any]]()
        for _ in range(100 * self.count):
            if len(rows) == self.count:
                break
            text = self.draw(rng)
            if (zlib.crc32(text.encode()) % HELD_OUT == 0) == (self.split == "heldout"):
                rows[text] = self.row(text, rng)
        if len(rows) < self.count:
            raise ValueError(
                f"{self.key}.count={self.count}: only {len(rows)} different prompts were found; lower it, or "
                f"{self.more.format(self.key)}"
            )
        for field in required:
            if field not in self.fields:
                raise ValueError(f"{self.key}: the built-in tasks have no field {field!r}; name another field")
        return list(rows.values())


@dataclass
class Symbolic(Generated):
    """Rows over strings of digits: `{prompt: "sort 4130=", answer: "0134", response: "0134", demonstration: "4130"}`.

    For preferences a row has a pair, `{chosen: "0134", rejected: "4130"}`, and a labelled completion, which is one of
    the two, `{completion: "4130", label: False}`. The rejected answer is the unchanged digits, or another number if
    those are right. The field `text` is prompt and answer together. For process rewards each digit of the answer is a
    step. In half of the rows a letter replaces one digit, and the steps from there on are labelled wrong:
    `{completions: ["0", "1", "r", "4"], labels: [True, True, False, False]}`.

    Args:
        key: supplied by the run: the yaml key.
        task: the operation on the digits.
        split: the training prompts, or the held-out ones (one in ten, by checksum).
        count: number of rows, all different.
        length: lengths of the shortest and the longest string of digits.
        slips: share of the demonstrations that repeat the digits unchanged.
        seed: seed of the random digits.

    Raises:
        ValueError: there are fewer than `count` different prompts.
    """

    key: str
    task: Literal["reverse", "sort", "add"]
    split: Literal["train", "heldout"]
    count: Annotated[int, Range(low=1, high=1_000_000)]
    length: tuple[PositiveInt, PositiveInt]
    slips: Annotated[Fraction, ReadWith("field demonstration")]
    seed: Seed
    fields = FIELDS
    more = "widen {}.length"

    def __post_init__(self) -> None:
        if self.length[0] > self.length[1]:
            raise ValueError(f"{self.key}.length={list(self.length)}: put the smaller number first")

    def draw(self, rng: random.Random) -> str:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(*self.length)))

    def row(self, text: str, rng: random.Random) -> dict[str, Any]:
        answer = TASKS[self.task](text)
        prompt = f"{self.task} {text}="
        shown = text if rng.random() < self.slips else answer
        wrong = text if text != answer else answer[:-1] + str((int(answer[-1]) + 1) % 10)
        good = zlib.crc32(prompt.encode()) % 2 == 0
        judged = answer if good else wrong
        values = (prompt, answer, answer, shown, answer, wrong, judged, good, prompt + answer)
        return dict(zip(FIELDS, (*values, *_steps(prompt, answer, good)), strict=True))


@dataclass
class Products(Generated):
    """Rows over products of two numbers: `{prompt: "37*48=", answer: "1776", demonstration: [...]}`.

    The demonstration is the rest of a dialogue: a call of the tool behind the mark `?`, its output and the answer.
    Often it is a guess instead, a number of as many digits. A model that imitates demonstrations learns to guess and,
    more rarely, to call the tool, which reinforcement learning then makes more frequent.

    Args:
        key: supplied by the run: the yaml key.
        split: the training prompts, or the held-out ones (one in ten, by checksum).
        count: number of rows, all different.
        digits: of each factor.
        slips: share of the demonstrations that guess.
        seed: seed of the random numbers.

    Raises:
        ValueError: there are fewer than `count` different prompts.
    """

    key: str
    split: Literal["train", "heldout"]
    count: Annotated[int, Range(low=1, high=1_000_000)]
    digits: Annotated[PositiveInt, Range(low=1, high=9)]
    slips: Annotated[Fraction, ReadWith("field demonstration")]
    seed: Seed
    fields = PRODUCT_FIELDS
    more = "raise {}.digits"

    def draw(self, rng: random.Random) -> str:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        return f"{rng.randint(low, high)}*{rng.randint(low, high)}"

    def row(self, text: str, rng: random.Random) -> dict[str, Any]:
        left, right = text.split("*")
        answer = str(int(left) * int(right))
        guess = str(rng.randint(10 ** (len(answer) - 1), 10 ** len(answer) - 1))
        called = [("assistant", f"?{text}"), ("tool", answer), ("assistant", answer)]
        shown = [("assistant", guess)] if rng.random() < self.slips else called
        messages = [{"role": role, "content": content} for role, content in shown]
        return dict(zip(PRODUCT_FIELDS, (f"{text}=", answer, messages), strict=True))


def _steps(prompt: str, answer: str, good: bool) -> tuple[list[str], list[bool]]:
    """The steps of an answer, of which one is a letter of the prompt unless `good`, and whether each is right."""
    place = len(answer) if good else zlib.adler32(prompt.encode()) % len(answer)
    steps = [prompt[place] if number == place else digit for number, digit in enumerate(answer)]
    return steps, [number < place for number in range(len(answer))]
