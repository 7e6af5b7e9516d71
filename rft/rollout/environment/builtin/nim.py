"""Nim with one pile: who takes the last stone wins. A game for self-play, and the same against an opponent."""

from typing import Any, ClassVar

from rft.ranges import PositiveInt


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
