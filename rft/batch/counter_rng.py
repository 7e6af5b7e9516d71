"""Random numbers as a function of a seed and an id: a token gets the same number on every rank and in any row order."""

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number
_MIX = (-4658895280553007687, -7723592293110705685)


def generator(seed: int, number: int) -> torch.Generator:
    """The generator of an epoch, or of another counted thing."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def signed(number: int) -> int:
    """The signed 64-bit number with the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def mix(z: Tensor) -> Tensor:
    """A 64-bit hash of each element, (...) int64: SplitMix64's finaliser (Steele, Lea and Flood 2014, figure 17)."""
    z = (z ^ shift(z, 30)) * _MIX[0]
    z = (z ^ shift(z, 27)) * _MIX[1]
    return z ^ shift(z, 31)


def shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def token_draws(seed: int, units: Tensor, columns: Tensor) -> Tensor:
    """A number in [0, 1) for every token of every row, (B, T) float64.

    Args:
        seed: another seed gives unrelated numbers.
        units: (B,) int64, the id of a row.
        columns: (T,) int64, the position of a token in its row.
    """
    start = torch.full((1,), signed(seed), dtype=torch.int64, device=units.device)
    streams = mix(mix(start) + units)  # (B,)
    return shift(mix(streams[:, None] + (columns + 1) * GOLDEN), 11).double() * 2.0**-53
