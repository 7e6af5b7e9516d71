"""Which tokens of a mini-batch pass a gradient of the policy loss. The weights of the tokens do not change."""

from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import GRADIENT_MASKS, AllSum, Gradient
from rft.algorithm.order_statistics import draws_of, largest, largest_of_rows, share_of, whole_share
from rft.ranges import Fraction


@GRADIENT_MASKS.register(
    "high_entropy",
    outputs=("entropy",),
    gradient=Gradient("near", cosine=0.303, note="the contribution of masked tokens is missing"),
)
def high_entropy(entropy: Tensor, batch: TensorDict, *, all_sum: AllSum, seed: int, rho: Fraction) -> Tensor:
    """The tokens of largest entropy in the mini-batch, over all ranks. arXiv 2506.01939, section 5.

    Of tokens of equal entropy at the boundary some are drawn, so that the share is met.

    Args:
        entropy: (B, T).
        all_sum: called at most 18 times.
        seed: of the drawing.
        rho: share of all trained tokens, rounded down, at least one token.

    Returns:
        (B, T) bool.
    """
    keep = batch["loss_mask"]
    return largest(entropy, keep, share_of(rho, keep, all_sum), draws_of(batch, seed), all_sum)


@GRADIENT_MASKS.register(
    "high_entropy_row",
    outputs=("entropy",),
    gradient=Gradient("near", cosine=0.559, note="the contribution of masked tokens is missing"),
)
def high_entropy_row(entropy: Tensor, batch: TensorDict, *, seed: int, rho: Fraction) -> Tensor:
    """The tokens of largest entropy in each row: `high_entropy`, with the share taken of every row by itself.

    Of tokens of equal entropy at the boundary some are drawn.

    Args:
        entropy: (B, T).
        seed: of the drawing.
        rho: share of the trained tokens of a row, rounded down, at least one token.

    Returns:
        (B, T) bool.
    """
    keep = batch["loss_mask"]
    return largest_of_rows(entropy, keep, whole_share(rho, keep.sum(dim=1)), draws_of(batch, seed))
