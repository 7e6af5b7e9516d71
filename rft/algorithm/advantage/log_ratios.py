"""Advantages with a log-ratio of two models at each token: an implicit process reward, that of a reward model to the
reference, and how much likelier a teacher finds what the policy has sampled.
"""

from typing import Any

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


def _teacher_gradient(options: dict[str, Any]) -> Gradient:
    if options["gamma"] == 1:
        return Gradient("exact", target="likeness to the teacher")
    left_out = "omits the effect of a token on later tokens"
    return Gradient("near", target="likeness to the teacher", cosine=0.988, note=left_out)


@ADVANTAGES.register(
    "teacher",
    reads=("teacher_logprobs", "old_logprobs"),
    raw=True,
    gradient=_teacher_gradient,
)
def teacher(scores: Tensor, rewards: Tensor, batch: TensorDict, *, gamma: Fraction) -> dict[str, Tensor]:
    """A_t = d_t + gamma A_{t+1}, d = lp_teacher - lp_old of the sampled token: minus an estimate of the reverse KL.

    Thinking Machines, On-Policy Distillation, 2025, https://thinkingmachines.ai/blog/on-policy-distillation/, with
    gamma 0. Scores are not used.

    Args:
        gamma: discount per trained token. With 1 the gradient is that of KL(policy, teacher) of whole answers.
    """
    closer = log_ratio(batch["teacher_logprobs"], batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    return {"advantages": following(closer.to(scores.dtype), batch["loss_mask"], gamma)}
