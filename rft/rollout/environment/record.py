"""What an episode did, as rewards, logs and people read it: the entry `EPISODE_FIELD` of its row."""

from dataclasses import dataclass
from typing import Any

from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.data.encode.encoder import Encoder


@dataclass
class EpisodeRecord:
    """The record of an episode; `rft.rollout.answers` names some of its fields.

    Attributes:
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

    messages: list[dict[str, Any]]
    opening: int
    turns: int
    tool_calls: int
    tool_failures: int
    environment_s: float
    forks: list[str]
    reward: float | None
    rewards: list[float]
    agent: int
    failed: str | None

    def __post_init__(self) -> None:
        self.environment_s = round(self.environment_s, 4)

    def trajectory(
        self, rows: list[list[Segment]], finish: Finish, row: dict[str, Any], encoder: Encoder
    ) -> Trajectory:
        """The episode as a trajectory; also one that failed has one.

        Args:
            rows: the segments of each batch row; empty if the episode ended before the first answer.
            row: of the data set.
            encoder: makes its prompt.
        """
        rows = rows or [[Segment(encoder.prompt(row), trains=False)]]
        return Trajectory(rows[-1], finish, row, tuple(rows[:-1]), vars(self))
