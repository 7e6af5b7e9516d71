"""The environment of one episode: calls its methods, and turns what they return into messages."""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rft.batch.row_fields import own_copy
from rft.data.tool_calls import ToolCall
from rft.rollout.environment.call_format import CallNotices
from rft.rollout.environment.contract import FIELD, EnvironmentClass, checked_reward, checked_step, refuse_arguments
from rft.rollout.environment.hosted import as_text
from rft.rollout.environment.instance import CallFailed, Instance
from rft.sanitize import one_line, valid_text

Messages = list[dict[str, Any]]
T = TypeVar("T")


class EnvironmentFailed(Exception):
    """An environment cannot go through an episode, which therefore has no score. The message begins with a reason."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of the calls of an environment.

    Attributes:
        deadline_s: of each call; None for no limit.
        characters: of a text that it returns; the rest is cut.
        slots: limits the calls at the same time.
    """

    deadline_s: float | None
    characters: int
    slots: asyncio.Semaphore


class LiveEnvironment:
    """An environment that one episode uses.

    Args:
        kind: its class.
        instance: its object.
        limits: of calls.
        notices: of calls.

    Attributes:
        steps: see `EnvironmentClass`.
        calls, failures: of tools so far; a call fails if it cannot be read or made, raises an error or misses its
            deadline.
        seconds: in calls of the environment so far; those at the same time count each.
        rewards: of the steps so far.
    """

    def __init__(
        self, kind: EnvironmentClass, instance: Instance, limits: CallLimits, notices: CallNotices | None = None
    ) -> None:
        self.steps = kind.steps
        self.calls, self.failures, self.seconds = 0, 0, 0.0
        self.rewards: list[float] = []
        self._class = kind
        self._instance = instance
        self._limits = limits
        self._notices = notices or CallNotices()

    async def reset(self, row: Mapping[str, Any]) -> str | Messages | None:
        """Begins the episode; returns what it adds to the prompt.

        Raises:
            EnvironmentFailed: it raised an error, missed its deadline or returned something else.
        """
        fields = {name: value for name, value in row.items() if name != FIELD}
        with _failing("reset"):
            return _observation(await self._call("reset", **fields))

    async def use(self, tool: ToolCall | str) -> str:
        """The output of a tool, or an error for the model to read; an unreadable call is the text of its error.

        Raises:
            EnvironmentFailed: the process of the environment has ended.
        """
        self.calls += 1
        fault = tool if isinstance(tool, str) else self._fault(tool)
        if fault is None:
            assert isinstance(tool, ToolCall)
            try:
                if self._class.dynamic:
                    output = as_text(await self._call("call_tool", tool.name, tool.arguments))
                else:
                    output = as_text(await self._call(tool.name, **tool.arguments))
                self._notices.used(tool.name, None)
                return output
            except CallFailed as error:
                fault = valid_text(str(error), f"{self._class.target.key}: {tool.name}")
                if self._instance.lost:
                    self.failures += 1
                    raise EnvironmentFailed(f"{error.reason}: {error}") from error
        self.failures += 1
        if isinstance(tool, ToolCall) and tool.name in self._class.tools:
            self._notices.used(tool.name, fault)
        return f"error: {fault}"

    def _fault(self, tool: ToolCall) -> str | None:
        if tool.name not in self._class.tools:
            return f"there is no tool {tool.name!r} (there are: {', '.join(self._class.tools)})"
        return refuse_arguments(tool.arguments, self._class.tools[tool.name])

    async def step(self, action: str) -> tuple[str | Messages, bool, bool]:
        """Observation, terminated and truncated after an action. The reward of the episode is the sum of `rewards`.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        with _failing("step"):
            observation, reward, terminated, truncated = checked_step(await self._call("step", action))
            self.rewards.append(reward)
            seen = _observation(observation) or ""
            if not isinstance(seen, str) and any(message["role"] == "assistant" for message in seen):
                raise ValueError("its observation has a message of the role assistant, which the policy has")
        return seen, terminated, truncated

    async def begin_game(self, row: Mapping[str, Any]) -> None:
        """Begins a game of several players.

        Raises:
            EnvironmentFailed: as in `reset`, or it returned something.
        """
        if await self.reset(row):
            raise EnvironmentFailed("reset: a game shows each player what get_observation returns; return None")

    async def observation(self) -> tuple[int, str | Messages]:
        """The number of the player whose turn it is, and what the player sees.

        Raises:
            EnvironmentFailed: as in `reset`, or there is no such player.
        """
        with _failing("get_observation"):
            turn = await self._call("get_observation")
            if not isinstance(turn, tuple | list) or len(turn) != 2 or turn[0] not in range(self._class.players):
                raise ValueError(
                    f"it returned {turn!r:.80}; it must return (player, observation), the player from 0 to "
                    f"{self._class.players - 1}"
                )
            return int(turn[0]), _observation(turn[1]) or ""

    async def act(self, action: str) -> bool:
        """The turn of a player. Returns whether the game has ended.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        with _failing("step"):
            outcome = await self._call("step", action)
            if not isinstance(outcome, tuple | list) or len(outcome) != 2:  # JSON has lists
                raise ValueError(f"it returned {outcome!r:.80}; a game must return (done, info)")
            return bool(outcome[0])

    async def rewards_of_players(self) -> list[float]:
        """The reward of each player.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        with _failing("get_rewards"):
            rewards, players = await self._call("get_rewards"), self._class.players
            if not isinstance(rewards, tuple | list) or len(rewards) != players:
                raise ValueError(f"it returned {rewards!r:.80}, not a reward for each of {players} players")
            return [checked_reward(reward) for reward in rewards]

    async def reward(self) -> float | None:
        """The reward of the episode; None if the class has none.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        if self.steps:
            return sum(self.rewards)
        if not self._class.scores:
            return None
        with _failing("get_reward"):
            return checked_reward(await self._call("get_reward"))

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        """The reward that an agent returns, which plays the whole episode; no deadline of a call applies.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        with _failing("run"):
            reward = await self._timed("run", deadline_s=None, data=dict(row), base_url=base_url, api_key=api_key)
            return None if reward is None else checked_reward(reward)

    async def outcome(self, episode: Coroutine[Any, Any, T], max_seconds: float | None) -> tuple[T | None, str | None]:
        """Awaits an episode and closes the environment.

        Args:
            episode: returns the reward, or that of each player.
            max_seconds: after which the episode fails; None for no limit.

        Returns:
            The reward, and why the episode failed; None each where there is none.
        """
        reward, failed = None, None
        try:
            async with asyncio.timeout(max_seconds) as deadline:
                reward = await episode
        except EnvironmentFailed as error:
            failed = one_line(str(error))
        except TimeoutError:
            if not deadline.expired():
                raise
            failed = f"seconds: the episode took longer than {max_seconds:g} s"
        try:
            await self.close()
        except EnvironmentFailed as error:
            failed = failed or one_line(str(error))
        return reward, failed

    async def close(self) -> None:
        """Ends the episode.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        try:
            if self._class.closes and not self._instance.lost:
                with _failing("close"):
                    await self._call("close")
        finally:
            self._instance.end()

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method returns, within the limits of a call."""
        async with self._limits.slots:
            return await self._timed(method, *arguments, deadline_s=self._limits.deadline_s, **options)

    async def _timed(self, method: str, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            returned = await self._instance.call(method, *arguments, most=self._limits.characters, **options)
            return valid_text(returned, f"{self._class.target.key}: {method}")
        finally:
            self.seconds += time.perf_counter() - start


@contextmanager
def _failing(method: str) -> Iterator[None]:
    """The episode fails if a call in the block does, or if a ValueError says that it returned something else."""
    try:
        yield
    except CallFailed as error:
        raise EnvironmentFailed(f"{error.reason}: {error}") from error
    except ValueError as error:
        raise EnvironmentFailed(f"{method}: {error}") from error


def _observation(value: Any) -> str | Messages | None:
    """What a method shows the policy.

    Raises:
        ValueError: it is something else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, Mapping) and {"role", "content"} <= {*item} for item in value):
        return [own_copy(dict(message)) for message in value]
    raise ValueError(f"it returned {value!r:.80}, neither text, chat messages nor None")
