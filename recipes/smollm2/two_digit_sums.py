"""Sums of two numbers with two digits, in the words of a user."""

import random
from collections.abc import Sequence
from typing import Any

from rft.ranges import NonNegativeInt, PositiveInt

SEED, LOW, HIGH = 0, 10, 99


class Additions:
    """Rows `{prompt: "What is 47 + 38?", answer: "85", response: "85"}` out of all 8,100, in one random order.

    Args:
        key: supplied by the run: the yaml key.
        start, count: of the rows in this order.

    Raises:
        ValueError: there are not so many.
    """

    def __init__(self, key: str, start: NonNegativeInt, count: PositiveInt) -> None:
        pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(LOW, HIGH + 1)]
        if start + count > len(pairs):
            raise ValueError(
                f"{key}: start={start} and count={count} are more than {len(pairs)} sums; lower one of them"
            )
        random.Random(SEED).shuffle(pairs)
        self._pairs = pairs[start : start + count]

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """Writes the rows."""
        return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b), "response": str(a + b)} for a, b in self._pairs]
