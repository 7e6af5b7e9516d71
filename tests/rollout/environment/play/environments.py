"""Environments of every kind. Nothing here imports torch, so that their processes start in tenths of a second."""

import sys
import time


class Shop:
    """Prices of goods. `reset` shows the budget of the row."""

    def __init__(self, currency: str = "EUR") -> None:
        self._currency = currency
        self._asked: list[str] = []

    def reset(self, budget=None, **row):
        self._budget = budget
        return None if budget is None else f" (budget {budget})"

    def price(self, item: str, count: int = 1) -> str:
        """The price of goods.

        Args:
            item: what is bought.
            count: how many.
        """
        self._asked.append(item)
        return f"{len(item) * count} {self._currency}"

    async def stock(self) -> dict:
        """What is in stock."""
        return {"tea": 3}

    def get_reward(self) -> float:
        return float(len(self._asked))


class Halves:
    """Says halves of surrogate pairs, as Python reads them from JSON."""

    def reset(self, **row):
        return "\ud800"

    def tells(self) -> str:
        """Returns one in a text."""
        return ["a\ud83d", {"\udc00": 1}]

    def raises(self) -> str:
        """Raises an error with one."""
        raise ValueError("\udfff")


class Faulty:
    """Tools that fail in every way."""

    def reset(self, fails="", **row):
        self._fails = fails
        if fails == "reset":
            raise OSError("no such place")
        return 7 if fails == "type" else None

    def raises(self) -> str:
        """Raises an error."""
        raise ZeroDivisionError("by zero")

    def hangs(self) -> str:
        """Takes long."""
        time.sleep(20)
        return "late"

    def prints(self) -> str:
        """Prints and returns 100 MB."""
        sys.stdout.write("x" * 1000)
        return "y" * 100_000_000

    def bytes(self) -> str:
        """Returns bytes that are no text."""
        return b"\xff\xfe ok"

    def dies(self) -> str:
        """Kills its process."""
        import os

        os.kill(os.getpid(), 9)
        return ""

    def leaves(self) -> str:
        """Calls exit."""
        raise SystemExit(3)

    def get_reward(self) -> float:
        return {"reward": float("nan"), "text": "1"}.get(self._fails, 1.0)


class Guess:
    """Gymnasium's protocol: guess the number of the row."""

    def reset(self, number, **row):
        self._number = number
        return [{"role": "user", "content": " guess:"}]

    def step(self, action):
        if action == "bad":
            return "no tuple"
        if action == "stop":
            return "", -1.0, False, True, {}
        right = action == str(self._number)
        return ("yes" if right else "low" if int(action) < self._number else "high"), float(right), right, False, {}

    def close(self):
        assert self._number != 13, "unlucky"


class Count:
    """A game of three players, who say a number in turn; a reward is the sum of what a player said."""

    players = 3

    def reset(self, fails="", **row):
        self._fails = fails
        self._said = []

    def get_observation(self):
        player = len(self._said) % 3
        if self._fails == "player":
            return 3, ""
        return player, " go" if len(self._said) < 3 else f"[{self._said[-1]}]"

    def step(self, action):
        if action == "raise":
            raise ZeroDivisionError("by zero")
        self._said.append(int(action))
        return action == "9", {}

    def get_rewards(self):
        if self._fails == "rewards":
            return [1.0]
        return [float(sum(self._said[player::3])) for player in range(3)]
