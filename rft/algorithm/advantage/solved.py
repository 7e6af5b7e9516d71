"""Advantages that depend on how often a prompt is solved: prompts without signal, the best answer, the success rate.

One number a row, on every trained token of it. A row without a trained token counts in its group, too.
"""

from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.group import EPSILON, spread
from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import ADVANTAGES, AllSum
from rft.algorithm.scores.groups import best_over_second, group_statistics
from rft.ranges import Range

REWEIGHED = Gradient(
    "near", cosine=0.991, note="rescaled for one prompt; with several, its weight depends on the others"
)


def _gradient_of_gpg(scale: str) -> Gradient:
    if scale == "none":
        return REWEIGHED
    return Gradient("near", cosine=0.997, note="rescaled for one prompt; graded scores change its direction")


@ADVANTAGES.register("gpg", group_baseline=True, gradient=_gradient_of_gpg)
def gpg(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, scale: Literal["group", "none"]
) -> dict[str, Tensor]:
    """alpha (R - mean_g), alpha = rows / rows in groups with unequal scores. GPG, arXiv 2504.02546, section 2.

    Both counts are over all ranks: the step is as large as if every group had a signal.

    Args:
        scale: F_norm of the paper. none: 1; group: divides by the standard deviation of the group (ddof 1) + 1e-6.
    """
    group = group_statistics(scores, batch["group"])
    advantage = _per_informative(torch.ones_like(group.size), group.tied, all_sum) * group.centred
    if scale == "group":
        advantage = advantage / (group.std + EPSILON)
    return {"advantages": spread(advantage, scores, batch)}


@ADVANTAGES.register("cpgd", group_baseline=True, gradient=REWEIGHED)
def cpgd(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, max_weight: Annotated[float, Range(low=1)]
) -> dict[str, Tensor]:
    """(R - mean_g) * min(groups / groups with unequal scores, max_weight). CPGD, arXiv 2505.12504, section 4.

    Args:
        max_weight: bound of the weight, for steps in which few groups have a signal.
    """
    group = group_statistics(scores, batch["group"])
    weight = _per_informative(1 / group.size, group.tied, all_sum).clamp(max=max_weight)
    return {"advantages": spread(weight * group.centred, scores, batch)}


def _gradient_of_pass_at_k(scale: bool) -> Gradient:
    if scale:
        return Gradient("near", target="max reward", cosine=0.968, note="the std of the group changes its direction")
    return Gradient(
        "scaled", target="max reward", factor=lambda n: 1 / n, note="only one row of a group has an advantage"
    )


@ADVANTAGES.register("pass_at_k", group_baseline=True, gradient=_gradient_of_pass_at_k)
def pass_at_k(scores: Tensor, rewards: Tensor, batch: TensorDict, *, scale: bool) -> dict[str, Tensor]:
    """r(1) - r(2) for the best row of a group, 0 for the others. arXiv 2503.19595, section 3.

    Its gradient is that of the expected best score of a group: pass@k for binary scores, with k the size of the group.
    A group of one, and one with several best rows, gets 0.

    Args:
        scale: divides by the standard deviation of the group (ddof 1) + 1e-6.
    """
    advantage = best_over_second(scores, batch["group"])
    if scale:
        advantage = advantage / (group_statistics(scores, batch["group"]).std + EPSILON)
    return {"advantages": spread(advantage, scores, batch)}


def _gradient_of_maxrl(order: str) -> Gradient:
    return Gradient("exact", target=f"log likelihood to order {order}", note="of binary scores")


@ADVANTAGES.register("maxrl", raw=True, group_baseline=True, gradient=_gradient_of_maxrl)
def maxrl(scores: Tensor, rewards: Tensor, batch: TensorDict, *, order: Literal["n-1", "n"]) -> dict[str, Tensor]:
    """(R - mean_g) / mean_g. MaxRL, arXiv 2602.02710, section 4.

    For scores of 0 and 1 and a rate of success p, the expected gradient is sum_{k <= order} (1 - p)^(k - 1) grad p: the
    log of p, expanded to that order. A group whose mean is not above 0 counts as failed, so scores must not be below 0.

    Args:
        order: what a failed group gets. n-1: 0; n: -1 on every row, which makes one order more.
    """
    group = group_statistics(scores, batch["group"])
    failed = 0.0 if order == "n-1" else -1.0
    return {"advantages": spread(torch.where(group.mean > 0, group.centred / group.mean, failed), scores, batch)}


def _per_informative(share: Tensor, tied: Tensor, all_sum: AllSum) -> Tensor:
    """The sum of all shares (N,) over that of the rows of groups that are not tied, over all ranks."""
    everything, informative = all_sum(torch.stack([share, share * ~tied]).sum(dim=1)).unbind()
    return everything / informative.clamp(min=1)
