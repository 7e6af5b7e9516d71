"""A game of several turns: find a number by its comparison with guesses."""

import zlib
from typing import Any

from rft.ranges import NonNegativeInt


class Guessing:
    """The number is a function of the row, so that all episodes of a group look for the same one.

    Args:
        low, high: the smallest and the largest number.
        reply: what a guess gets, for a number that is too low and too high.

    Raises:
        ValueError: `low` is above `high`.
    """

    def __init__(self, *, low: NonNegativeInt, high: NonNegativeInt, reply: tuple[str, str]) -> None:
        if low > high:
            raise ValueError(f"low={low} is above high={high}")
        self._low = low
        self._high = high
        self._reply = reply

    def reset(self, prompt: Any, **row: Any) -> None:
        """Chooses the number; adds nothing to the prompt."""
        self._number = self._low + zlib.crc32(str(prompt).encode()) % (self._high - self._low + 1)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compares a guess. The reward is 1 for the right one; what is no number ends the game."""
        text = action.strip()
        if not (text.isascii() and text.isdigit()):
            return "", 0.0, True, False, {}
        guess = int(text)
        if guess == self._number:
            return "", 1.0, True, False, {}
        return self._reply[guess > self._number], 0.0, False, False, {}
