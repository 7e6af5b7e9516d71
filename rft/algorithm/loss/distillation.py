"""Losses whose target is the distribution of a teacher at every token.

Divergences from a teacher are of the distribution over the next token and not of a sampled one alone. Both
distributions are over K + 1 outcomes: the K tokens that the teacher finds likeliest, and all others as one. So the
result is a divergence of two distributions: 0 only if they agree on these outcomes, at most the divergence over the
whole vocabulary, and equal to it if K is the size of the vocabulary. Other libraries sum over the K tokens alone, which
may give a value below 0, or renormalise both distributions over them, which ignores the mass outside.
"""

import math

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, Gradient, Unreduced
from rft.batch.columns import over
from rft.ranges import OpenFraction

TEACHER = ("teacher_top_ids", "teacher_top_logprobs")
NOTE = "of the next token at given texts"


def outcomes(logprobs: Tensor, keep: Tensor) -> Tensor:
    """Log-probabilities of K tokens (B, T, K) and of all others as one, (B, T, K + 1); uniform where not trained.

    The others have the remaining probability, at least the machine epsilon.
    """
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    logprobs = torch.where(over(keep, logprobs), logprobs, -math.log(logprobs.shape[-1] + 1))
    left = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, left.clamp(min=torch.finfo(left.dtype).eps).log()], -1)


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """KL(one, other) of distributions by their log-probabilities (B, T, K), (B, T)."""
    return (one.exp() * (one - other)).sum(-1)


def both(logprobs: Tensor, batch: TensorDict) -> tuple[Tensor, Tensor]:
    """The outcomes of teacher and policy, (B, T, K + 1) each; equal, with a divergence of 0, where nothing trains."""
    return outcomes(batch["teacher_top_logprobs"], batch["loss_mask"]), outcomes(logprobs, batch["loss_mask"])


@LOSSES.register(
    "forward_kl",
    outputs=("candidate_logprobs",),
    reads=TEACHER,
    gradient=Gradient("exact", target="minus the forward KL", note=NOTE),
)
def forward_kl(candidate_logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """KL(teacher, policy) per token (B, T): mode-covering. Knowledge distillation, arXiv 1503.02531."""
    teacher, policy = both(candidate_logprobs, batch)
    return divergence(teacher, policy), {}


@LOSSES.register(
    "reverse_kl",
    outputs=("candidate_logprobs",),
    reads=TEACHER,
    gradient=Gradient("exact", target="minus the reverse KL", note=NOTE),
)
def reverse_kl(candidate_logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """KL(policy, teacher) per token (B, T): mode-seeking. MiniLLM, arXiv 2306.08543."""
    teacher, policy = both(candidate_logprobs, batch)
    return divergence(policy, teacher), {}


@LOSSES.register(
    "jsd",
    outputs=("candidate_logprobs",),
    reads=TEACHER,
    gradient=Gradient("exact", target="minus the JSD", note=NOTE),
)
def jsd(candidate_logprobs: Tensor, batch: TensorDict, *, beta: OpenFraction) -> Unreduced:
    """beta KL(teacher, m) + (1 - beta) KL(policy, m) per token (B, T), m = beta teacher + (1 - beta) policy.

    The generalized Jensen-Shannon divergence of GKD, arXiv 2306.13649, equation 1.

    Args:
        beta: towards 0 it is beta times the forward KL, towards 1 it is 1 - beta times the reverse one.
    """
    teacher, policy = both(candidate_logprobs, batch)
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    between = beta * divergence(teacher, mixture) + (1 - beta) * divergence(policy, mixture)
    return torch.where(batch["loss_mask"], between, 0.0), {}
