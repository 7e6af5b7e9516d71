"""One answer of the policy: what the engine sampled, as segments of a trajectory; and what the episodes among answers
log."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rft.batch.scores import spell_reason
from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.metrics import Metrics
from rft.rollout.engine.base import Completion

Announce = Callable[[int, int, Trajectory], None]  # the number of a row, that of its sample, the finished trajectory
FAILED, FORKS = "failed", "forks"  # entries of `Trajectory.episode`
MEANS = ("turns", "tool_calls", "tool_failures", "environment_s")  # those whose means are logged


@dataclass(frozen=True)
class Answer:
    """A finished answer to a prompt.

    Attributes:
        segments: what stands behind the prompt: a sampled segment, or two and what a forced stop inserted.
        finish: how it ended, and its text.
    """

    segments: list[Segment]
    finish: Finish

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def logprobs(self) -> list[float]:
        """Of all tokens; NaN where a token is given, or the engine does not report it."""
        return [number for segment in self.segments for number in segment.logprobs or [math.nan] * len(segment.tokens)]

    def trajectory(self, prompt: list[int], row: dict[str, Any]) -> Trajectory:
        """The trajectory of one answer to a prompt.

        Args:
            prompt: token ids.
            row: of the data set.
        """
        return Trajectory([Segment(prompt, trains=False), *self.segments], self.finish, row)


def sampled_segment(completion: Completion) -> Segment:
    """The segment of a completion: all of it trains."""
    return Segment(completion.tokens, True, completion.logprobs, completion.versions)


def uncut(completion: Completion) -> Answer:
    """The answer of one completion."""
    return Answer([sampled_segment(completion)], Finish(completion.finish_reason, completion.text))


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
