"""The weight of a token in the loss. Weights are computed once over a whole mini-batch of all ranks, so the loss is the
plain sum of weight * loss wherever its rows end up. Tokens outside `loss_mask` weigh 0, and a row without a trained
token counts in no denominator.

Every function takes keep (B, T) and group (B,) int64, and returns (B, T) float32. `keep` is what each token counts: the
bool of `loss_mask`, or, where the data give weights, float32: the weight of the token times that of its row. `rows`
(B,), for a function that takes it, is what each row counts. "Tokens" and "rows" below are the sums of both.
"""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import AGGREGATIONS, AllSum, Gradient
from rft.algorithm.scores.groups import dense_numbers
from rft.batch.columns import over
from rft.ranges import PositiveFloat
from rft.registry import Plugin


@AGGREGATIONS.register(
    "token_mean", gradient=Gradient("near", cosine=0.999, note="a row's own length is in the denominator")
)
def token_mean(keep: Tensor, group: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / trained tokens. DAPO, arXiv 2503.14476, section 3.3."""
    return _over(keep, all_sum(_sum(keep)))


@AGGREGATIONS.register(
    "seq_mean_token_mean", gradient=Gradient("near", cosine=0.971, note="a token of a longer row has less weight")
)
def seq_mean_token_mean(keep: Tensor, group: Tensor, *, rows: Tensor, all_sum: AllSum) -> Tensor:
    """1 / (rows * trained tokens of the row). GRPO, arXiv 2402.03300, equation 3."""
    return _over(keep, _sum(keep, dim=1)[:, None]) * unit_weights(rows, all_sum=all_sum)[:, None]


@AGGREGATIONS.register("seq_mean_token_sum", gradient=Gradient("exact"))
def seq_mean_token_sum(keep: Tensor, group: Tensor, *, rows: Tensor, all_sum: AllSum) -> Tensor:
    """1 / rows."""
    return _over(keep, all_sum(_sum(rows)))


@AGGREGATIONS.register(
    "seq_mean_token_sum_norm",
    gradient=lambda constant: Gradient("scaled", factor=lambda n: 1 / constant, note="by 1 / constant"),
)
def seq_mean_token_sum_norm(
    keep: Tensor, group: Tensor, *, rows: Tensor, all_sum: AllSum, constant: PositiveFloat
) -> Tensor:
    """1 / (rows * constant). Dr.GRPO, arXiv 2503.20783, section 3.1.

    Args:
        constant: the same number for every batch, such as the largest response length; not the width of this one.
    """
    return _over(keep, all_sum(_sum(rows))) / constant


@AGGREGATIONS.register(
    "group_mean", gradient=Gradient("near", cosine=0.970, note="a prompt with longer answers has less weight")
)
def group_mean(keep: Tensor, group: Tensor, *, all_sum: AllSum) -> Tensor:
    """1 / (groups * trained tokens of the group): equal weight per prompt, token mean inside it.

    Weights of rows count inside their group.

    A group is whole on one rank when its weights are computed.
    """
    index, tokens = dense_numbers(group), _sum(keep, dim=1)
    tokens = torch.zeros_like(tokens).index_add(0, index, tokens)  # (B,) of each group, then zeros
    groups = all_sum((tokens > 0).sum())
    return _over(keep, (tokens[index] * groups)[:, None])


@AGGREGATIONS.register("token_sum", gradient=Gradient("scaled", note="by the number of rows"))
def token_sum(keep: Tensor, group: Tensor) -> Tensor:
    """1: the plain sum over all tokens of the step."""
    return keep.float()


def unit_weights(rows: Tensor, *, all_sum: AllSum) -> Tensor:
    """rows / their sum over all ranks: the weights of a loss with unit `sequence`, (B,) float32.

    Args:
        rows: (B,) what each row counts: 0 without a trained token.
    """
    return _over(rows, all_sum(_sum(rows)))


def counted(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """What each token (B, T) and each row (B,) counts: bool, or float32 with the weights that the data give.

    Sums of weights are float64, so that they are the same however rows are spread over ranks, but for the last bits.
    """
    keep: Tensor = batch["loss_mask"]
    rows = keep.any(dim=1)
    if "row_weights" in batch.keys():
        rows = rows * batch["row_weights"].float()
        keep = keep * rows[:, None]
    if "token_weights" in batch.keys():
        keep = keep * batch["token_weights"].float()
    return keep, rows


def tokens_of_rows(batch: TensorDict) -> Tensor:
    """What the trained tokens of each row count together, (B,) float32: their number, or the sum of their weights."""
    keep: Tensor = batch["loss_mask"]
    return _sum(keep * batch["token_weights"] if "token_weights" in batch.keys() else keep, dim=1).float()


def divisor(total: Tensor) -> Tensor:
    """A total as a divisor: where it is 0, what it divides is 0, too."""
    return torch.where(total == 0, 1, total)


def weigh_logprobs(loss: Plugin, outputs: Mapping[str, Tensor], batch: TensorDict) -> tuple[list[Tensor], TensorDict]:
    """The outputs that a loss takes, and the batch that it reads.

    The weights of tokens reach a loss with one value a row, such as that of a pair, in its log-probabilities: those of
    the policy and those in the batch are multiplied by them. A loss per token has them in `loss_weights`.
    """
    names = loss.facts.outputs
    if loss.facts.unit == "token" or "token_weights" not in batch.keys():
        return [outputs[name] for name in names], batch
    weights, rows = batch["token_weights"], batch.copy()
    for name in loss.facts.reads:
        if name.endswith("logprobs"):
            rows[name] = batch[name] * over(weights, batch[name])
    return [outputs[name] * weights if name == "logprobs" else outputs[name] for name in names], rows


def _sum(counts: Tensor, dim: int | None = None) -> Tensor:
    """The sum of bools, int64, or of weights, float64."""
    counts = counts.double() if counts.is_floating_point() else counts
    return counts.sum() if dim is None else counts.sum(dim=dim)


def _over(counts: Tensor, total: Tensor) -> Tensor:
    """counts / total, float32. Where the total is 0, the counts are 0, too, and so is the quotient."""
    return counts / divisor(total).float()


def row_mean(x: Tensor, keep: Tensor) -> Tensor:
    """The mean over the trained tokens of a row (B,) of what is zero outside them (B, T); 0 where there is none."""
    return x.sum(dim=1) / keep.sum(dim=1).clamp(min=1)


def row_weights(batch: TensorDict) -> Tensor:
    """The geometric mean (B,) of `correction_weights` over the trained tokens of a row: 0 if one of them is 0."""
    keep, weights = batch["loss_mask"], batch["correction_weights"]
    return (torch.where(keep, weights, 1.0).log().sum(dim=1) / keep.sum(dim=1).clamp(min=1)).exp()
