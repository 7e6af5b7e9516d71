"""Nim with one pile: who takes the last stone wins. A game of two players, the same with an opponent, and its rows."""

import random
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from rft.ranges import PositiveInt, Range, Seed

FIELDS = ("prompt", "stones", "environment", "demonstration")


class _Pile:
    """Stones that two players take in turn.

    Args:
        most: stones that a turn may take; at least 1.
    """

    def __init__(self, *, most: PositiveInt) -> None:
        self._most = most

    def reset(self, stones: int, **row: Any) -> None:
        """Begins with the stones of the row; adds nothing to the prompt, which states them."""
        self._stones = stones

    def _take(self, action: str) -> bool:
        """Takes stones; False if the action is no number from 1 to `most`, or more than there are."""
        text = action.strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= min(self._most, self._stones)):
            return False
        self._stones -= int(text)
        return True

    def _shown(self) -> str:
        return f"{self._stones}:"


class Nim(_Pile):
    """Two players. Each sees the stones that are left, and answers how many to take.

    The one who takes the last stone has the reward 1, the other 0. A wrong action loses.
    """

    players: ClassVar[int] = 2

    def reset(self, stones: int, **row: Any) -> None:
        """See `_Pile.reset`."""
        super().reset(stones)
        self._turn = 0
        self._winner = 0

    def get_observation(self) -> tuple[int, str]:
        """The player whose turn it is, and the stones; at the first turn nothing, for the prompt states them."""
        return self._turn % 2, self._shown() if self._turn else ""

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        """Takes stones for the player whose turn it is; returns whether the game has ended."""
        player, legal = self._turn % 2, self._take(action)
        self._turn += 1
        self._winner = player if legal else 1 - player
        return not legal or self._stones == 0, {}

    def get_rewards(self) -> list[float]:
        """1 for the winner and 0 for the other; of a game that a limit ended, the last one to take stones has won."""
        return [float(player == self._winner) for player in range(2)]


class NimOpponent(_Pile):
    """One player, who begins, against an opponent that wins wherever it can, and else takes one stone."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes stones; the opponent answers. The reward is 1 for taking the last stone. A wrong action loses."""
        legal = self._take(action)
        if not legal or self._stones == 0:
            return "", float(legal), True, False, {}
        self._stones -= self._stones % (self._most + 1) or 1
        return self._shown(), 0.0, self._stones == 0, False, {}


class Games:
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
                raise ValueError(f"{self._key}: the game has no field {field!r}; name another field")
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
