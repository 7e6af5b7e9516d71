"""What an episode did, as rewards, logs and people read it: the entry `EPISODE_FIELD` of its row."""

from collections.abc import Sequence
from typing import Any

import torch

from rft.batch.scores import spell_reason
from rft.batch.trajectory import Trajectory
from rft.metrics import Metrics

FAILED, FORKS = "failed", "forks"
MEANS = ("turns", "tool_calls", "tool_failures", "environment_s")  # entries whose means are logged


def episode_record(
    messages: list[dict[str, Any]],
    *,
    opening: int,
    turns: int,
    tool_calls: int,
    tool_failures: int,
    environment_s: float,
    forks: list[str],
    reward: float | None,
    rewards: list[float],
    agent: int,
    failed: str | None,
) -> dict[str, Any]:
    """The record of an episode.

    Args:
        messages: of the dialogue, in the format of chat templates.
        opening: messages of the prompt among them; the answers stand behind it.
        turns: answers of the policy.
        tool_calls, tool_failures: of tools.
        environment_s: seconds in calls of the environment.
        forks: the reason of each fork of the dialogue.
        reward: of the environment; None if it has none.
        rewards: of each step, of an environment with steps.
        agent: see `Environments.number_of`.
        failed: why the episode has no score; None if it did not fail.
    """
    return {
        "messages": messages,
        "opening": opening,
        "turns": turns,
        "tool_calls": tool_calls,
        "tool_failures": tool_failures,
        "environment_s": round(environment_s, 4),
        FORKS: forks,
        "reward": reward,
        "rewards": rewards,
        "agent": agent,
        FAILED: failed,
    }


def failure_of(trajectory: Trajectory) -> str | None:
    """Why the episode of a trajectory has no score; None if it did not fail, or if there is no episode."""
    return None if trajectory.episode is None else trajectory.episode[FAILED]


def log_episodes(trajectories: Sequence[Trajectory], metrics: Metrics) -> None:
    """Adds the means `episode/<entry>`, the share `episode/failed`, and the numbers of forks and failures by reason."""
    records = [trajectory.episode for trajectory in trajectories if trajectory.episode is not None]
    if not records:
        return
    for name in MEANS:
        metrics.mean(f"episode/{name}", torch.tensor([float(record[name]) for record in records]))
    metrics.mean(f"episode/{FAILED}", torch.tensor([float(record[FAILED] is not None) for record in records]))
    metrics.count(f"episode/{FORKS}", sum(len(record[FORKS]) for record in records))
    for record in records:
        for reason in record[FORKS]:
            metrics.count(f"episode/{FORKS}/{spell_reason(reason)}", 1)
        if record[FAILED] is not None:
            metrics.count(f"episode/{FAILED}/{spell_reason(record[FAILED])}", 1)
