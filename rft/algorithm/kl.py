"""Estimates of the KL divergence from sampled tokens."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rft.algorithm.ratio import LARGEST_LOG_RATIO


def k1(d: Tensor) -> Tensor:
    """d. Unbiased, and negative as often as not. (http://joschu.net/blog/kl-approx.html, for k1 to k3.)"""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2. Biased, low variance."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Unbiased and never negative. d is clamped to at least -20, so exp does not overflow.

    expm1, because near 0 the difference of exp(-d) and 1 is mostly rounding.
    """
    d = d.clamp(min=-LARGEST_LOG_RATIO)  # in both places: d alone would push a token the wrong way beyond the clamp
    return torch.expm1(-d) + d


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """The value of one estimate with the gradient of another."""
    return gradient + (value - gradient).detach()


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL((p, 1 - p), (q, 1 - q)) of two log-probabilities of one token; float32 at least, of the shape given."""
    smallest = torch.finfo(logprobs.dtype).eps  # what a probability that is rounded to 1 may leave to the other tokens
    rest, other_rest = ((-torch.expm1(column)).clamp(min=smallest) for column in (logprobs, other))
    return logprobs.exp() * (logprobs - other) + rest * (rest.log() - other_rest.log())


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """The KL per token that goes into the reward, of d = logprobs - ref_logprobs; float32 at least.

    Args:
        logprobs, ref_logprobs: (B, T), of the tokens that the first policy sampled.
        estimator: k1 makes the reward exact; the others are there for comparison with published runs.
    """
    d = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) - ref_logprobs
    return ESTIMATORS[estimator](d)  # (B, T)
