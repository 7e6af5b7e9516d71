"""Episodes of one player: the policy and an environment take turns."""

import asyncio
from typing import Any

from rft.batch.trajectory import Trajectory
from rft.rollout.environment.live import LiveEnvironment
from rft.rollout.environment.play.player import Player, Policy


async def play_alone(policy: Policy, live: LiveEnvironment, row: dict[str, Any], seed: int) -> Trajectory:
    """Plays the episode of one player to its end; also one that fails has a trajectory.

    Args:
        policy: answers.
        live: the environment.
        row: of the data set.
        seed: of the first answer.
    """
    player, options = Player(policy, row, seed), policy.environments.options

    async def episode() -> float | None:
        player.begin(await live.reset(row))
        await _converse(player, live, options.max_turns)
        return await live.reward()

    reward, failed = await live.outcome(episode(), options.max_seconds)
    return player.trajectory(live, reward=reward, failed=failed)


async def _converse(player: Player, live: LiveEnvironment, max_turns: int) -> None:
    """Turns of the policy and of the environment, to the end of the dialogue."""
    while (calls := await player.answer()) is not None and player.reason != "length":
        if live.steps:
            observation, terminated, truncated = await live.step(player.text)
            given, ended = player.as_messages(observation), terminated or truncated
            player.reason = "length" if truncated and not terminated else "stop"
        elif calls:
            outputs = await asyncio.gather(*(live.use(call) for call in calls))
            given, ended = [{"role": "tool", "content": player.cut(output)} for output in outputs], False
        else:
            return
        if ended:
            return
        if player.answers == max_turns:
            player.reason = "length"
            return
        player.read(given)
