"""Shaping: changes to a score before an advantage is computed from it."""

from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.registries import SHAPINGS
from rft.ranges import Fraction, NonNegativeFloat, PositiveInt


@SHAPINGS.register("overlong")
def overlong(
    scores: Tensor, batch: TensorDict, *, max_tokens: PositiveInt, buffer: Fraction, factor: NonNegativeFloat
) -> Tensor:
    """Adds factor * clip(-(L - (max - b)) / b, -1, 0), L the trained tokens of the row, b = buffer * max. (B,) -> (B,)

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13. Shaping comes before any filter, so L counts
    `response_mask` and not `loss_mask`.

    Args:
        max_tokens: length at which the penalty is complete.
        buffer: share of `max_tokens` before it over which the penalty grows from 0; 0 punishes only what is longer.
        factor: the complete penalty.
    """
    length = batch["response_mask"].sum(dim=1)
    ramp = buffer * max_tokens
    excess = (length - (max_tokens - ramp)) / max(ramp, 1)
    return scores - factor * excess.clamp(0, 1).to(scores.dtype)
