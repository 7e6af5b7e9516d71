"""Dynamic sampling (DAPO, 2503.14476): rounds of prompts, until a step has enough groups with signal."""

import logging
import math

import torch

from rft.algorithm.scores.groups import informative_groups
from rft.batch.scores import is_scored
from rft.metrics import Metrics
from rft.rollout.source.rollout import NO_SIGNAL, DynamicSampling, Group, RolloutSource


def keeps(options: DynamicSampling, group: Group) -> bool:
    """True where a group has signal. A trajectory without a score does not count."""
    terms = {row["unit"]: row["terms"][options.term] for row in group}  # one of each trajectory
    raw = torch.stack(list(terms.values()))
    raw = raw[is_scored(raw)]
    if not len(raw):
        return False
    low, high = options.between or (-math.inf, math.inf)
    inside = low <= float(raw.double().sum()) / len(raw) <= high
    return inside and bool(informative_groups(raw, torch.zeros(len(raw), dtype=torch.int64)).all())


def report_signal(options: DynamicSampling, informative: int, prompts: int, rest: str, metrics: Metrics) -> None:
    """Adds the share of a step's groups that have signal, and says where they are too few.

    Args:
        informative: groups with signal; those above `prompts` do not count.
        rest: what fills the batch.
    """
    metrics.add("rollout/informative", min(informative, prompts) / prompts, 1.0)
    if informative < prompts:
        logging.getLogger(__name__).warning(
            "dynamic sampling found %d of %d groups with signal in %r in algorithm.source.redraw.max_rounds=%d "
            "rounds; %s fill the batch",
            informative, prompts, options.term, options.max_rounds, rest,
        )  # fmt: skip


def draw_until_full(source: RolloutSource, options: DynamicSampling, metrics: Metrics) -> list[Group]:
    """Rounds until all ranks together hold enough groups with signal; the surplus is kept for the next step."""
    good: list[Group] = source.surplus
    spare: list[Group] = []
    prompts, share = source.context.prompts, source.context.share
    for round_number in range(1, options.max_rounds + 1):
        if _total(source, len(good)) >= prompts:
            break
        for group in source.draw(metrics):
            (good if keeps(options, group) else spare).append(group)
        metrics.largest("rollout/rounds", round_number)
    informative = _total(source, len(good))
    report_signal(options, informative, prompts, "groups without signal", metrics)
    good, spare = source.all_groups(good), source.all_groups(spare)
    chosen = good[:prompts] + spare[: max(0, prompts - informative)]
    source.drop(spare[max(0, prompts - informative) :][share], NO_SIGNAL)
    # Groups move between ranks, because which rank finds signal is random.
    source.surplus = good[prompts:][share]
    return chosen[share]


def _total(source: RolloutSource, number: int) -> int:
    return sum(source.context.world.gather(number))
