"""One answer of the policy: what the engine sampled, as segments of a trajectory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.rollout.engine.base import Completion

Announce = Callable[[int, int, Trajectory], None]  # the number of a row, that of its sample, the finished trajectory


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


def sampled_segment(completion: Completion) -> Segment:
    """The segment of a completion: all of it trains."""
    return Segment(completion.tokens, True, completion.logprobs, completion.versions)


def uncut(completion: Completion) -> Answer:
    """The answer of one completion."""
    return Answer([sampled_segment(completion)], Finish(completion.finish_reason, completion.text))


def single_turn(prompt: list[int], completion: Completion, row: dict[str, Any]) -> Trajectory:
    """The trajectory of one sampled response to a prompt.

    Args:
        prompt: token ids.
        row: of the data set.
    """
    answer = uncut(completion)
    return Trajectory([Segment(prompt, trains=False), *answer.segments], answer.finish, row)
