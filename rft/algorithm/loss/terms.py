"""Terms: losses that are added to another one with a coefficient."""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.kl import k2, k3
from rft.algorithm.ratio import log_ratio
from rft.algorithm.registries import LOSSES, Unreduced


@LOSSES.register("entropy", outputs=("entropy",))
def entropy(entropy: Tensor, batch: TensorDict) -> Unreduced:
    """-H per token (B, T), so that a positive coefficient rewards entropy."""
    return torch.where(batch["keep"], -entropy, 0.0), {}


@LOSSES.register("kl", reads=("ref_logprobs",))
def kl(logprobs: Tensor, batch: TensorDict, *, estimator: Literal["k2", "k2_row", "k3"]) -> Unreduced:
    """An estimate of KL(policy, reference), of d = lp - lp_ref, per token (B, T).

    A term is there for its gradient, and in that the estimators differ (on-policy, measured against the gradient of
    the KL of whole sequences):
    - `k2_row`: half the square of the row's sum of d, each token with its share. Exact: that of k1 in the reward.
    - `k2`: d^2 / 2. Leaves out what a token does to the KL of the tokens after it.
    - `k3`: exp(-d) - 1 + d (GRPO). Its value is unbiased, its gradient that of KL(reference, policy) at each token.
    - k1, d itself, is refused: its gradient is 0 on average, so as a term it does nothing but add noise.

    Statistics: `kl/ref` (k3), whatever the estimator.
    """
    difference = log_ratio(logprobs, batch["ref_logprobs"], batch["keep"])  # (B, T)
    statistics = {"kl/ref": k3(difference.detach())}
    if estimator == "k2_row":
        return 0.5 * difference.sum(dim=1, keepdim=True) * difference, statistics
    return (k2 if estimator == "k2" else k3)(difference), statistics
