"""What an episode did, as rewards, logs and people read it: the entry `EPISODE_FIELD` of its row."""

from typing import Any

from rft.rollout.answers import FAILED, FORKS


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
