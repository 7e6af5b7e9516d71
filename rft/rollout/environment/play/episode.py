"""Episodes: the policy and an environment take turns, or the policy plays all players of a game (self-play)."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rft.batch.trajectory import Trajectory
from rft.rollout.engine.base import row_seed
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


async def play_game(
    policy: Policy, live: LiveEnvironment, row: dict[str, Any], seeds: Sequence[int], players: int
) -> list[Trajectory]:
    """Plays a game to its end. Each player has a dialogue, a trajectory and a reward of its own.

    Args:
        policy: answers for all players.
        live: the game.
        row: of the data set.
        seeds: of the first answers of the players whose trajectories are returned, from player 0 on.
        players: their number.

    Returns:
        A trajectory for each seed. Of a player without an answer it has no score; of a game that failed, none has one.
    """
    others = [row_seed(seeds[0], number, 2) for number in range(len(seeds), players)]
    all_players, options = [Player(policy, row, seed) for seed in (*seeds, *others)], policy.environments.options

    async def game() -> list[float]:
        await live.begin_game(row)
        ended = False
        while not ended:
            number, observation = await live.observation()
            player = all_players[number]
            if player.begun:
                player.read(player.as_messages(observation))
            else:
                player.begin(observation)
            if await player.answer() is None:
                break
            ended = await live.act(player.text)
            if player.answers == options.max_turns and not ended:
                player.reason = "length"
                break
        return await live.rewards_of_players()

    rewards, failed = await live.outcome(game(), options.max_seconds)
    return [
        player.trajectory(
            live,
            reward=None if rewards is None else rewards[number],
            failed=failed or (None if player.answers else "turns: the game ended before the first turn of the player"),
            number=number,
        )
        for number, player in enumerate(all_players[: len(seeds)])
    ]
