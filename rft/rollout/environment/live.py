"""The environment of one episode: calls its methods, and turns what they return into messages."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rft.batch.row_fields import own_copy
from rft.data.tool_calls import ToolCall
from rft.rollout.environment.call_format import CallNotices
from rft.rollout.environment.calls import CallFailed
from rft.rollout.environment.contract import FIELD, EnvironmentClass, checked_reward, checked_step, refuse_arguments
from rft.rollout.environment.hosted import as_text
from rft.rollout.environment.instance import Instance
from rft.sanitize import one_line, valid_text

Messages = list[dict[str, Any]]
T = TypeVar("T")


class EnvironmentFailed(Exception):
    """An environment cannot go through an episode, which therefore has no score. The message begins with a reason."""


@dataclass
class Counts:
    """What an episode has done with its environment.

    Attributes:
        calls, failures: of tools; a call fails if it cannot be read or made, raises an error or misses its deadline.
        seconds: in calls of the environment; those at the same time count each.
    """

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


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
        made: its class.
        instance: its object.
        limits: of calls.
        notices: of calls.

    Attributes:
        steps: see `EnvironmentClass`.
        counts: so far.
        rewards: of the steps so far.
    """

    def __init__(
        self, made: EnvironmentClass, instance: Instance, limits: CallLimits, notices: CallNotices | None = None
    ) -> None:
        self.steps = made.steps
        self.counts = Counts()
        self._class = made
        self._instance = instance
        self._limits = limits
        self._notices = notices or CallNotices()
        self.rewards: list[float] = []

    async def reset(self, row: Mapping[str, Any]) -> str | Messages | None:
        """Begins the episode; returns what it adds to the prompt.

        Raises:
            EnvironmentFailed: it raised an error, missed its deadline or returned something else.
        """
        fields = {name: value for name, value in row.items() if name != FIELD}
        return _observation("reset", await self._required("reset", **fields))

    async def use(self, tool: ToolCall | str) -> str:
        """The output of a tool, or an error for the model to read; an unreadable call is the text of its error.

        Raises:
            EnvironmentFailed: the process of the environment has ended.
        """
        self.counts.calls += 1
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
                    self.counts.failures += 1
                    raise EnvironmentFailed(f"{error.reason}: {error}") from error
        self.counts.failures += 1
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
        found = await self._required("step", action)
        try:
            observation, reward, terminated, truncated = checked_step(found)
        except ValueError as error:
            raise EnvironmentFailed(f"step: {error}") from error
        self.rewards.append(reward)
        seen = _observation("step", observation) or ""
        if not isinstance(seen, str) and any(message["role"] == "assistant" for message in seen):
            raise EnvironmentFailed("step: its observation has a message of the role assistant, which the policy has")
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
        found = await self._required("get_observation")
        if not isinstance(found, tuple | list) or len(found) != 2 or found[0] not in range(self._class.players):
            raise EnvironmentFailed(
                f"get_observation: it returned {found!r:.80}; it must return (player, observation), the player from 0 "
                f"to {self._class.players - 1}"
            )
        return int(found[0]), _observation("get_observation", found[1]) or ""

    async def act(self, action: str) -> bool:
        """The turn of a player. Returns whether the game has ended.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        found = await self._required("step", action)
        if not isinstance(found, tuple | list) or len(found) != 2:  # JSON has lists
            raise EnvironmentFailed(f"step: it returned {found!r:.80}; a game must return (done, info)")
        return bool(found[0])

    async def rewards_of_players(self) -> list[float]:
        """The reward of each player.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        found, players = await self._required("get_rewards"), self._class.players
        if not isinstance(found, tuple | list) or len(found) != players:
            raise EnvironmentFailed(
                f"get_rewards: it returned {found!r:.80}, not a reward for each of {players} players"
            )
        try:
            return [checked_reward(reward) for reward in found]
        except ValueError as error:
            raise EnvironmentFailed(f"get_rewards: {error}") from error

    async def reward(self) -> float | None:
        """The reward of the episode; None if the class has none.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        if self.steps:
            return sum(self.rewards)
        if not self._class.scores:
            return None
        try:
            return checked_reward(await self._required("get_reward"))
        except ValueError as error:
            raise EnvironmentFailed(f"get_reward: {error}") from error

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        """The reward that an agent returns, which plays the whole episode; no deadline of a call applies.

        Raises:
            EnvironmentFailed: as in `reset`.
        """
        start = time.perf_counter()
        try:
            found = await self._instance.call(
                "run", deadline_s=None, most=self._limits.characters, data=dict(row), base_url=base_url, api_key=api_key
            )
            return None if found is None else checked_reward(found)
        except CallFailed as error:
            raise EnvironmentFailed(f"{error.reason}: {error}") from error
        except ValueError as error:
            raise EnvironmentFailed(f"run: {error}") from error
        finally:
            self.counts.seconds += time.perf_counter() - start

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
                await self._required("close")
        finally:
            self._instance.end()

    async def _required(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return await self._call(method, *arguments, **options)
        except CallFailed as error:
            raise EnvironmentFailed(f"{error.reason}: {error}") from error

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        limits = self._limits
        async with limits.slots:
            start = time.perf_counter()
            try:
                found = await self._instance.call(
                    method, *arguments, deadline_s=limits.deadline_s, most=limits.characters, **options
                )
                return valid_text(found, f"{self._class.target.key}: {method}")
            finally:
                self.counts.seconds += time.perf_counter() - start


def _observation(method: str, found: Any) -> str | Messages | None:
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list) and all(isinstance(part, Mapping) and {"role", "content"} <= {*part} for part in found):
        return [own_copy(dict(message)) for message in found]
    raise EnvironmentFailed(f"{method}: it returned {found!r:.80}, neither text, chat messages nor None")
