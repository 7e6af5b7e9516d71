"""Statistics over all ranks, computed from sums: moments and whitening."""

import torch
from torch import Tensor

from rft.algorithm import AllSum


def deviations(values: Tensor, mask: Tensor | None, all_sum: AllSum) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of the values under a mask, over all ranks, float64 scalars.

    Args:
        mask: of the shape of the values; None: all of them count.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    values = torch.where(mask, values.double(), 0.0)
    count, total = all_sum(torch.stack([mask.sum().double(), values.sum()])).unbind()
    mean = total / count.clamp(min=1)
    return count, mean, all_sum(torch.where(mask, (values - mean).square(), 0.0).sum())


def moments(values: Tensor, mask: Tensor | None, all_sum: AllSum) -> tuple[Tensor, Tensor]:
    """Mean and variance (ddof 1; 0 of a single value) of the values under a mask, over all ranks, float64 scalars."""
    count, mean, squares = deviations(values, mask, all_sum)
    return mean, squares / (count - 1).clamp(min=1)


def whitened(values: Tensor, mask: Tensor | None, all_sum: AllSum) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) under the mask, statistics over all ranks; zero outside it.

    Args:
        values: (B, T).
        mask: (B, T) bool; None: all of them count.
        all_sum: sum over ranks; called twice, on every rank.
    """
    mean, variance = moments(values, mask, all_sum)
    white = (values.double() - mean) * (variance + 1e-8).rsqrt()
    return (white if mask is None else torch.where(mask, white, 0.0)).to(values.dtype)
