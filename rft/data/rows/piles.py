"""The rows of the built-in game Nim."""

import random
from collections.abc import Sequence
from typing import Annotated, Any

from rft.ranges import PositiveInt, Range, Seed

FIELDS = ("prompt", "stones", "environment", "demonstration")


class Piles:
    """Rows over piles of stones: `{prompt: "13:", stones: 13, environment: nim, demonstration: [...]}`.

    The demonstration is one player's side of a game in which both players take a random number of stones.

    Args:
        key: supplied by the run: the yaml key.
        count: number of rows; they go through the piles in turn.
        stones: the smallest and the largest pile.
        most: stones that a turn may take.
        environment: the name of the class in `environment.classes`.
        winning: only piles from which the player who begins can win.
        seed: of the random numbers.

    Raises:
        ValueError: there is no such pile.
    """

    def __init__(
        self,
        key: str,
        count: Annotated[int, Range(low=1, high=1_000_000)],
        stones: tuple[PositiveInt, PositiveInt],
        most: PositiveInt,
        environment: str,
        winning: bool,
        seed: Seed,
    ) -> None:
        low, high = stones
        self._piles = [pile for pile in range(low, high + 1) if not winning or pile % (most + 1)]
        if not self._piles:
            raise ValueError(f"{key}.stones={list(stones)}: there is no such pile; set [smallest, largest]")
        self._key = key
        self._count = count
        self._most = most
        self._environment = environment
        self._seed = seed

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """Draws the rows."""
        for field in required:
            if field not in FIELDS:
                raise ValueError(f"{self._key}: the built-in game has no field {field!r}; name another field")
        rng = random.Random(self._seed)
        return [self._row(self._piles[number % len(self._piles)], rng) for number in range(self._count)]

    def _row(self, pile: int, rng: random.Random) -> dict[str, Any]:
        player, left, turn, messages = rng.randrange(2), pile, 0, list[dict[str, str]]()
        while left:
            taken = rng.randint(1, min(self._most, left))
            if turn % 2 == player:
                if turn:
                    messages.append({"role": "user", "content": f"{left}:"})
                messages.append({"role": "assistant", "content": str(taken)})
            left, turn = left - taken, turn + 1
        if not messages:  # the first turn took all stones: the second player has none
            messages.append({"role": "assistant", "content": str(pile)})
        return dict(zip(FIELDS, (f"{pile}:", pile, self._environment, messages), strict=True))
