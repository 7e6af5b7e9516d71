"""A source that samples as `RolloutSource` does, and chooses the groups that train."""

import math
from dataclasses import dataclass
from typing import Any

from rft.metrics import Metrics
from rft.ranges import PositiveInt
from rft.rollout.source.rollout import RolloutOptions, RolloutSource


@dataclass(frozen=True, kw_only=True)
class HalfSolvedOptions(RolloutOptions):
    """Options of `HalfSolvedSource`, beside those of `RolloutSource`.

    Attributes:
        rounds: how many groups are sampled for each group that trains.
    """

    rounds: PositiveInt


class HalfSolvedSource(RolloutSource):
    """Of more groups than a step needs, those train whose mean score is nearest to a half."""

    Options = HalfSolvedOptions
    options: HalfSolvedOptions

    def draw(self, metrics: Metrics) -> list[list[dict[str, Any]]]:
        context = self.context
        drawn = self.row_sampler.take(context.prompts * self.options.rounds)
        groups = self.all_groups(self.answer(drawn[context.share], metrics))  # of all ranks, in the same order on each
        groups.sort(key=distance)
        self.drop(groups[context.prompts :][context.share], "far from a half")
        return groups[: context.prompts][context.share]


def distance(group: list[dict[str, Any]]) -> float:
    """That of the mean score of a group from a half; a group without a score comes last."""
    mean = float(sum(row["scores"] for row in group)) / len(group)
    return math.inf if math.isnan(mean) else abs(mean - 0.5)
