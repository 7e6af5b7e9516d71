"""Log-ratios of two policies at the sampled tokens, and the ratio, which is clamped so that it cannot overflow."""

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, other: Tensor, keep: Tensor) -> Tensor:
    """logprobs - other at the trained tokens, 0 elsewhere (B, T); float32 at least."""
    difference = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) - other
    return torch.where(keep, difference, 0.0)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20; beyond the clamp it has no gradient."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
