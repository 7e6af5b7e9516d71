"""The weight of a token in the loss. Weights are computed once over a whole mini-batch of all ranks, so the loss is the
plain sum of weight * loss wherever its rows end up. Tokens outside `loss_mask` weigh 0, and a row without a trained
token counts in no denominator.

Every function takes keep (B, T) bool and group (B,) int64, and returns (B, T) float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import AGGREGATIONS, AllSum
from rft.algorithm.scores.groups import dense_numbers
from rft.ranges import PositiveFloat


@AGGREGATIONS.register(
    "token_mean", gradient=Gradient("near", cosine=0.999, note="a row's own length is in the denominator")
)
def token_mean(keep: Tensor, group: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / trained tokens. DAPO, arXiv 2503.14476, section 3.3."""
    return keep / _at_least_one(all_sum(keep.sum()))


@AGGREGATIONS.register(
    "seq_mean_token_mean", gradient=Gradient("near", cosine=0.971, note="a token of a longer row has less weight")
)
def seq_mean_token_mean(keep: Tensor, group: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / (rows * trained tokens of the row). GRPO, arXiv 2402.03300, equation 3."""
    return keep / _at_least_one(keep.sum(dim=1, keepdim=True)) * unit_weights(keep, all_sum=all_sum)[:, None]


@AGGREGATIONS.register("seq_mean_token_sum", gradient=Gradient("exact"))
def seq_mean_token_sum(keep: Tensor, group: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / rows."""
    return keep * unit_weights(keep, all_sum=all_sum)[:, None]


def _by_constant(options: Mapping[str, Any]) -> Gradient:
    return Gradient("scaled", factor=lambda n: 1 / options["constant"], note="by 1 / constant")


@AGGREGATIONS.register("seq_mean_token_sum_norm", gradient=_by_constant)
def seq_mean_token_sum_norm(keep: Tensor, group: Tensor, *, all_sum: AllSum, constant: PositiveFloat) -> Tensor:
    """1 / (rows * constant). Dr.GRPO, arXiv 2503.20783, section 3.1.

    Args:
        constant: the same number for every batch, such as the largest response length; not the width of this one.
    """
    return keep * unit_weights(keep, all_sum=all_sum)[:, None] / constant


@AGGREGATIONS.register(
    "group_mean", gradient=Gradient("near", cosine=0.970, note="a prompt with longer answers has less weight")
)
def group_mean(keep: Tensor, group: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / (groups * trained tokens of the group): equal weight per prompt, token mean inside it.

    A group is whole on one rank when its weights are computed.
    """
    index = dense_numbers(group)
    tokens = torch.zeros_like(group).index_add(0, index, keep.sum(dim=1))  # (B,) of each group, then zeros
    groups = all_sum((tokens > 0).sum())
    return keep / (_at_least_one(tokens)[index] * _at_least_one(groups))[:, None]


@AGGREGATIONS.register("token_sum", gradient=Gradient("scaled", note="by the number of rows"))
def token_sum(keep: Tensor, group: Tensor) -> Tensor:
    """1: the plain sum over all tokens of the step."""
    return keep.float()


def unit_weights(keep: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / rows that have a trained token, over all ranks: the weights of a loss with unit `sequence`, (B,) float32."""
    trained = keep.any(dim=1)
    return trained / _at_least_one(all_sum(trained.sum()))


def _at_least_one(count: Tensor) -> Tensor:
    """A count as a divisor: where it is 0, the numerator is 0, too."""
    return count.clamp(min=1)
