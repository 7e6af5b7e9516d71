"""Rows of guessing games. The player of the demonstrations halves what is left in some games, and guesses in others."""

import random
from collections.abc import Sequence
from typing import Any

from rft.ranges import Fraction, NonNegativeInt, PositiveInt, Seed
from rft.rollout.environment.builtin.guessing import Guessing


class Games:
    """Rows `{prompt: "0042:", demonstration: [...]}`: the name of a game, and how the player plays it.

    In some games the player halves the numbers that are left; in the others each guess is any number of the game. The
    environment of the run hides the number, which is a function of the prompt, and replies.

    Args:
        key: supplied by the run: the yaml key.
        start, count: the number of the first game, and how many games follow; their names have four digits.
        game: the options of the environment.
        turns: most guesses of a demonstration.
        halves: the share of games in which the player halves.
        seed: of the player.

    Raises:
        ValueError: the names have more than four digits.
    """

    def __init__(
        self,
        key: str,
        start: NonNegativeInt,
        count: PositiveInt,
        game: dict[str, Any],
        turns: PositiveInt,
        halves: Fraction,
        seed: Seed,
    ) -> None:
        if start + count > 10_000:
            raise ValueError(f"{key}.count={count}: the last game has more than four digits; lower it, or {key}.start")
        self._numbers = range(start, start + count)
        self._options = {name: game[name] for name in ("low", "high", "reply")}
        self._turns = turns
        self._halves = halves
        self._seed = seed

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """Plays every game."""
        player = random.Random(self._seed)
        return [self._row(f"{number:04}:", player) for number in self._numbers]

    def _row(self, prompt: str, player: random.Random) -> dict[str, Any]:
        first, last = low, high = self._options["low"], self._options["high"]
        halves = player.random() < self._halves
        game = Guessing(**self._options)
        game.reset(prompt)
        messages: list[dict[str, str]] = []
        for _ in range(self._turns):
            guess = (low + high) // 2 if halves else player.randint(first, last)
            reply, _, found, _, _ = game.step(str(guess))
            messages.append({"role": "assistant", "content": str(guess)})
            if found:
                break
            messages.append({"role": "user", "content": reply})
            low, high = (guess + 1, high) if reply == self._options["reply"][0] else (low, guess - 1)
        if not found:
            messages.pop()  # the last reply, which ends the game
        return {"prompt": prompt, "demonstration": messages}
