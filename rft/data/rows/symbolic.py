"""The built-in tasks: short texts with one right answer, made on the spot. Train and held-out sets share no prompt.

Besides its right answer every row has a demonstration by a sloppy demonstrator, who often leaves the digits as they
stand. Imitating it teaches how to answer, and the task too, but as the rarer of two habits: what reinforcement has to
find.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

TASKS: dict[str, Callable[[str], str]] = {
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "add": lambda digits: str(sum(int(digit) for digit in digits)),
}
FIELDS = (
    *("prompt", "answer", "response", "demonstration", "chosen", "rejected", "completion", "label", "text"),
    *("completions", "labels"),
)
HELD_OUT = 10  # one prompt in so many, by its checksum


class Symbolic:
    """Rows over strings of digits: `{prompt: "sort 4130=", answer: "0134", response: "0134", demonstration: "4130"}`.

    For learning from preferences a row has a pair, `{chosen: "0134", rejected: "4130"}`, and a judgement of one of the
    two, `{completion: "4130", label: False}`. What is rejected is the slip, or where that is right another number. The
    field `text` is prompt and answer in one. For learning from steps it has an answer digit by digit, in every
    other row with a letter in place of one, from which on no step is right: `{completions: ["0", "1", "r", "4"],
    labels: [True, True, False, False]}`.

    Args:
        key: supplied; its place in the yaml.
        task: what is asked of the digits.
        split: which prompts: those that train, or those held out (one in ten, by checksum).
        count: rows, all different.
        length: shortest and longest string of digits.
        slips: share of the demonstrations that leave the digits as they stand.
        seed: of the draw.

    Raises:
        ValueError: there are not so many different prompts.
    """

    def __init__(
        self,
        key: str,
        task: Literal["reverse", "sort", "add"],
        split: Literal["train", "heldout"],
        count: int,
        length: list[int],
        slips: float,
        seed: int,
    ) -> None:
        self._key = key
        self._task = task
        self._split = split
        self._count = count
        self._length = length
        self._slips = slips
        self._seed = seed

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """Draws the rows."""
        shortest, longest = self._length
        rng = random.Random(self._seed)
        rows: dict[str, dict[str, Any]] = {}
        for _ in range(100 * self._count):
            if len(rows) == self._count:
                break
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(shortest, longest)))
            if (zlib.crc32(digits.encode()) % HELD_OUT == 0) == (self._split == "heldout"):
                answer = TASKS[self._task](digits)
                prompt = f"{self._task} {digits}="
                shown = digits if rng.random() < self._slips else answer
                wrong = digits if digits != answer else answer[:-1] + str((int(answer[-1]) + 1) % 10)
                good = zlib.crc32(prompt.encode()) % 2 == 0
                judged = answer if good else wrong
                values = (prompt, answer, answer, shown, answer, wrong, judged, good, prompt + answer)
                rows[prompt] = dict(zip(FIELDS, (*values, *_steps(prompt, answer, good)), strict=True))
        if len(rows) < self._count:
            raise ValueError(
                f"{self._key}.count={self._count}: only {len(rows)} different prompts were found; lower it, or widen "
                f"{self._key}.length"
            )
        for field in required:
            if field not in FIELDS:
                raise ValueError(f"{self._key}: the built-in tasks have no field {field!r}; choose another reward")
        return list(rows.values())


def _steps(prompt: str, answer: str, good: bool) -> tuple[list[str], list[bool]]:
    """The digits of an answer, one of them a letter of the prompt unless it is to be good, and what is right so far."""
    place = len(answer) if good else zlib.adler32(prompt.encode()) % len(answer)
    steps = [prompt[place] if number == place else digit for number, digit in enumerate(answer)]
    return steps, [number < place for number in range(len(answer))]
