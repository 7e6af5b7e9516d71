"""The largest values over all ranks, and exact means, which select the tokens that a loss treats differently.

Which token is selected must not depend on how rows are spread over ranks and micro-batches, not even in the last bit.
So what selects tokens sums integers alone: sums of integers do not depend on the order of the summands.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import AllSum
from rft.batch.counter_rng import token_draws

LARGEST = torch.iinfo(torch.int64).max
SMALLEST = torch.iinfo(torch.int64).min


def ordered(values: Tensor) -> Tensor:
    """float64 to the int64 of the same order."""
    bits = (values.double() + 0.0).view(torch.int64)  # + 0.0: minus zero is zero
    return torch.where(bits < 0, bits ^ LARGEST, bits)


def crossing(keys: Tensor, weights: Tensor, limit: int | Tensor, all_sum: AllSum) -> Tensor:
    """The smallest key at which the sum of the weights of all keys up to it is above a limit.

    That sum must stay above the limit from there on. The key is found byte by byte, from the highest: of 256 intervals
    one holds it.

    Args:
        keys, weights: int64, of one shape; a weight of 0 leaves its key out.
        limit: at least the sum over nothing, 0, or -1 to be above it at once.
        all_sum: called 8 times with 256 numbers, or once where the limit is never passed.

    Returns:
        int64 scalar; the largest int64 if the limit is never passed.
    """
    keys, weights = keys.flatten() ^ SMALLEST, weights.flatten()  # the order of unsigned numbers
    key = keys.new_zeros(())
    before = keys.new_zeros(())
    for shift in range(56, -1, -8):
        bytes_ = (keys >> shift) & 255
        sums = all_sum(keys.new_zeros(256).index_add(0, bytes_, weights))
        totals = before + sums.cumsum(0)  # (256,)
        over = (totals > limit).nonzero()[:, 0]
        if not len(over):
            return keys.new_tensor(LARGEST)
        byte = over[0]
        before = totals[byte] - sums[byte]
        key = key | (byte << shift)
        weights = torch.where(bytes_ == byte, weights, 0)
    return key ^ SMALLEST


def draws_of(batch: TensorDict, seed: int) -> Tensor:
    """Random numbers, one for every token (B, T): a function of the seed, the unit of the row and the column."""
    keep = batch["loss_mask"]
    return token_draws(seed, batch["unit"], torch.arange(keep.shape[1], device=keep.device))


def largest(values: Tensor, mask: Tensor, count: int | Tensor, draws: Tensor, all_sum: AllSum) -> Tensor:
    """The `count` largest values under a mask, over all ranks; all of them where there are fewer.

    Among equal values at the boundary those with the largest draws are taken, so the count is met.

    Args:
        values: (B, T); what is outside the mask may be anything.
        mask: (B, T) bool.
        count: 0 or more, the same on every rank.
        draws: (B, T) random numbers, one for every token.
        all_sum: called at most 17 times.

    Returns:
        (B, T) bool.
    """
    keys = ordered(values)
    least = _least_of_the_largest(keys, mask, count, all_sum)
    above, tied = mask & (keys > least), mask & (keys == least)
    missing = count - all_sum(above.sum())
    lots = ordered(draws)
    return above | (tied & (lots >= _least_of_the_largest(lots, tied, missing, all_sum)))


def largest_of_rows(values: Tensor, mask: Tensor, counts: Tensor, draws: Tensor) -> Tensor:
    """The `counts` (B,) largest values of each row under a mask; among equal values those with the largest draws.

    Args:
        values, mask, draws: (B, T), as in `largest`.

    Returns:
        (B, T) bool.
    """
    keys = torch.where(mask, ordered(values), SMALLEST)
    by_draw = draws.argsort(dim=1, descending=True)
    order = by_draw.gather(1, keys.gather(1, by_draw).argsort(dim=1, descending=True, stable=True))
    return mask & (order.argsort(dim=1) < counts[:, None])


def _least_of_the_largest(keys: Tensor, mask: Tensor, count: int | Tensor, all_sum: AllSum) -> Tensor:
    return ~crossing(~keys, mask.long(), count - 1, all_sum)  # ~ turns the order round


def up_to_mean(values: Tensor, mask: Tensor, bound: float, all_sum: AllSum) -> Tensor:
    """The values under a mask that stay when the largest are taken out until the mean of the rest is within a bound.

    Equal values stay or go together.

    Args:
        values: (B, T) in 0 to 400; compared to 2^-30, which leaves room for the sum of 10^7 tokens.
        mask: (B, T) bool.
        bound: of the mean over all ranks.
        all_sum: called at most 8 times.

    Returns:
        (B, T) bool.
    """
    keys = (torch.where(mask, values.double(), 0.0) * 2**30).round().long()
    excess = torch.where(mask, keys - round(bound * 2**30), 0)
    return mask & (keys < crossing(keys, excess, 0, all_sum))


def share_of(share: float, mask: Tensor, all_sum: AllSum) -> Tensor:
    """How many tokens a share of those under the mask is, over all ranks: rounded down, at least 1; int64 scalar."""
    return whole_share(share, all_sum(mask.sum()))


def whole_share(share: float, count: Tensor) -> Tensor:
    """A share of a count, rounded down, at least 1; int64 of its shape."""
    return (count.double() * share + 1e-6).long().clamp(min=1)  # 0.29 of 100 is 28.999... in floats


def exact_mean(values: Tensor, mask: Tensor, all_sum: AllSum) -> Tensor:
    """The mean under a mask over all ranks, the same to the last bit however the rows are spread; float64 scalar.

    Args:
        values: (B, T); taken to 2^-48, and summed as long as the sum is below 10^14.
        mask: (B, T) bool.
        all_sum: called once.
    """
    scaled = torch.where(mask, values.double(), 0.0) * 2**16
    high = scaled.round()
    low = ((scaled - high) * 2**32).round()
    sums = all_sum(torch.stack([high.long().sum(), low.long().sum(), mask.sum()])).double()
    return (sums[0] + sums[1] * 2.0**-32) * 2.0**-16 / sums[2].clamp(min=1)
