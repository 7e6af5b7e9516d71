"""Advantages with an implicit process reward: beta times the log-ratio of a reward model to the reference."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.returns import following
from rft.algorithm.gradient import Gradient
from rft.algorithm.ratio import log_ratio
from rft.algorithm.registries import ADVANTAGES
from rft.algorithm.scores.groups import group_statistics
from rft.ranges import Fraction, PositiveFloat


@ADVANTAGES.register(
    "prime",
    reads=("prm_logprobs", "ref_logprobs"),
    group_baseline=True,
    gradient=Gradient(
        "near", target="reward and process reward", cosine=1.0, note="a baseline per token favours one length of answer"
    ),
)
def prime(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, beta: PositiveFloat, gamma: Fraction
) -> dict[str, Tensor]:
    """Leave-one-out on the score, plus returns of p_t = beta (lp_prm - lp_ref), less the others' mean p.

    A_t = R - mean of the others' R + sum over s >= t of gamma^(s-t) (p_s - b), b the mean over the others of mean p.
    PRIME, arXiv 2502.01456, equation 5. A group of one has no others: 0.

    Args:
        beta: scale of the process reward; the same as in the loss of the reward model.
        gamma: discount per trained token.
    """
    keep, group = batch["loss_mask"], batch["group"]
    process = beta * log_ratio(batch["prm_logprobs"], batch["ref_logprobs"], keep).double()  # (B, T)
    mean = process.sum(1) / keep.sum(1).clamp(min=1)  # (B,)
    size = group_statistics(mean, group).size
    others = (size - 1).clamp(min=1)
    baseline = (group_statistics(mean, group).mean * size - mean) / others  # (B,)
    outcome = group_statistics(scores, group).centred * size / others
    dense = following(process - baseline[:, None], keep, gamma)  # (B, T)
    advantages = torch.where(keep & (size > 1)[:, None], dense + outcome[:, None], 0.0)
    return {"advantages": advantages.to(scores.dtype)}
