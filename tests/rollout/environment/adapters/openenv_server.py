"""A server of OpenEnv with a game: `python openenv_server.py PORT SESSIONS [STEPS]`.

The game shows the sum of the numbers so far. The server ends in the step of the number STEPS.
"""

import itertools
import os
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    text: str
    factor: int = 1


class Sum(Observation):
    shown: Any


class Sums(Environment):
    """Adds numbers, or of a text how many different characters it has. The end is a sum of ten or more."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    left = itertools.count(int(sys.argv[3]) - 1, -1) if sys.argv[3:] else itertools.count(1)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._total = seed or 0
        return Sum(shown=f" begin at {self._total}")

    def step(self, action, timeout_s=None, **kwargs):
        if next(self.left) == 0:
            os._exit(3)
        if action.text == "x":
            raise ValueError("no x")
        number = (int(action.text) if action.text.isdigit() else len({*action.text})) * action.factor
        self._total += number
        return Sum(
            shown={"total": self._total}, reward=None if number == 0 else self._total / 10, done=self._total >= 10
        )

    @property
    def state(self):
        return State(episode_id="1", step_count=0)


if __name__ == "__main__":
    app = create_fastapi_app(Sums, Add, Sum, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
