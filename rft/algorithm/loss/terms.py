"""Terms, losses that are added to another one with a coefficient; and coefficients that move, by a number that was
measured in the step before.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import CONTROLS, LOSSES, AllSum, Gradient, Unreduced
from rft.algorithm.divergence import ESTIMATORS, k2, k3, log_ratio, ratio, straight_through
from rft.algorithm.objective import Control
from rft.ranges import NonNegativeFloat, PositiveFloat


@LOSSES.register(
    "entropy",
    outputs=("entropy",),
    controlled_by="entropy",
    gradient=Gradient("exact", target="entropy per position"),
)
def entropy(entropy: Tensor, batch: TensorDict) -> Unreduced:
    """-H per token (B, T), so that a positive coefficient rewards entropy.

    The gradient is that of the entropy at the sampled positions; the effect of a token on later positions is left out.
    """
    return torch.where(batch["loss_mask"], -entropy, 0.0), {}


def kl_gradient(estimator: str) -> Gradient:
    """The gradient of the `kl` term, by its estimator."""
    if estimator == "k2_row":
        return Gradient("exact", target="kl")
    if estimator == "k3":
        return Gradient("near", target="kl", cosine=0.885, note="at each token the gradient of KL(reference, policy)")
    return Gradient("near", target="kl", cosine=0.975, note="omits the effect of a token on later tokens")


def kl_reads(estimator: str) -> tuple[str, ...]:
    """The columns that the `kl` term reads, by its estimator."""
    return ("ref_logprobs", "old_logprobs") if estimator == "k3_ratio" else ("ref_logprobs",)


@LOSSES.register("kl", reads=kl_reads, controlled_by="kl/ref", gradient=kl_gradient)
def kl(
    logprobs: Tensor, batch: TensorDict, *, estimator: Literal["k2", "k2_row", "k3", "k3_ratio", "k1+", "k3+"]
) -> Unreduced:
    """An estimate of KL(policy, reference), of d = lp - lp_ref, per token (B, T).

    A term matters by its gradient, and the estimators differ in it (on-policy, against the gradient of the KL of whole
    sequences):
    - `k2_row`: half the square of the row's sum of d, each token with its share. Exact: that of k1 in the reward.
    - `k2`: d^2 / 2. Leaves out the effect of a token on the KL of the tokens after it.
    - `k3`: exp(-d) - 1 + d (GRPO). Its value is unbiased, its gradient that of KL(reference, policy) at each token.
    - `k3_ratio`: r * k3, r the ratio to the old policy. Its gradient, r d times that of lp, is that of k2 corrected for
      tokens of the old policy. DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    - `k1+`, `k3+`: straight-through, the value of k1 or k3 with the gradient of k2.
    - k1, d itself, is refused: its gradient is 0 on average, so as a term it does nothing but add noise.

    Statistics: `kl/ref` (k3), whatever the estimator.
    """
    difference = log_ratio(logprobs, batch["ref_logprobs"], batch["loss_mask"])  # (B, T)
    statistics = {"kl/ref": k3(difference.detach())}
    if estimator == "k2_row":
        return 0.5 * difference.sum(dim=1, keepdim=True) * difference, statistics
    if estimator == "k3_ratio":
        weight = ratio(log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])).detach()
        # The derivative of r k3, r (k3 + 1 - exp(-d)), is r d: that of sg(r) k2, without the rounding of large terms.
        return straight_through(weight * k3(difference), weight * k2(difference)), statistics
    estimate = ESTIMATORS[estimator.removesuffix("+")](difference)
    return straight_through(estimate, k2(difference)) if estimator.endswith("+") else estimate, statistics


@LOSSES.register(
    "router_balance",
    outputs=("router_balance",),
    unit="sequence",
    gradient=Gradient("exact", target="router balance", note="for the current shares of the experts"),
)
def router_balance(router_balance: Tensor, batch: TensorDict) -> Unreduced:
    """The sequence-wise balance loss of DeepSeek-V3, arXiv 2412.19437, eq. 17-20, of the trained tokens of a row (B,).

    The sum over routers and experts i of f_i P_i, where f_i is the part of the tokens that went to i, times experts /
    chosen experts, and P_i the mean affinity to i: 1 for each router if the tokens are spread evenly.
    """
    return torch.where(batch["loss_mask"], router_balance, 0.0).sum(1), {}


def positive_scale(logprobs: Tensor, batch: TensorDict, *, all_sum: AllSum, term: str) -> dict[str, Tensor]:
    """`positive_scale` (B,): trained tokens / trained tokens of correct rows over all ranks, 0 in the other rows."""
    keep, correct = batch["loss_mask"], batch["terms"][term] > 0
    tokens = all_sum(torch.stack([keep.sum(), keep[correct].sum()])).double()
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return {"positive_scale": (correct * tokens[0] / tokens[1].clamp(min=1)).to(dtype)}


@LOSSES.register(
    "positive_nll",
    reads=("terms",),
    prepare=positive_scale,
    gradient=Gradient("scaled", target="likelihood of correct rows", note="by trained tokens / those of correct rows"),
)
def positive_nll(logprobs: Tensor, batch: TensorDict, *, term: str) -> Unreduced:
    """-lp on the trained tokens of correct rows, times trained tokens / trained tokens of correct rows (B, T).

    VAPO, arXiv 2504.05118, section 4.3, divides by the tokens of the correct rows: so does this, where the aggregation
    is token_mean; under another one every correct row keeps its weight in it, times the same factor.

    Args:
        term: the reward term, before any shaping, that is above 0 where a row is correct.
    """
    return torch.where(batch["loss_mask"], -logprobs * batch["positive_scale"][:, None], 0.0), {}


@LOSSES.register(
    "drift",
    reads=("old_logprobs",),
    idle_on_policy=("coef",),
    controlled_by="kl/old",
    gradient=Gradient("none", note="no gradient on policy; off policy exact for KL(old, current)"),
)
def drift(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """r - 1 - ln r per token (B, T), the k3 estimate of KL(old, current): unbiased in value and in gradient, (r - 1).

    The policy drift of CPGD, arXiv 2505.12504.

    Statistics: `kl/old`, the same.
    """
    divergence = k3(-log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"]))
    return divergence, {"kl/old": divergence.detach()}


def observation_scale(logprobs: Tensor, batch: TensorDict, *, all_sum: AllSum) -> dict[str, Tensor]:
    """`observation_scale` (B,): rows that train / their observed tokens over all ranks, 0 in the other rows."""
    trained = batch["loss_mask"].any(1)
    rows, tokens = all_sum(torch.stack([trained.sum(), batch["observation_mask"][trained].sum()])).double().unbind()
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return {"observation_scale": (trained * rows / tokens.clamp(min=1)).to(dtype)}


@LOSSES.register(
    "echo",
    reads=("observation_mask",),
    unit="sequence",
    prepare=observation_scale,
    gradient=Gradient("scaled", target="likelihood of observations", note="by 1 / observed tokens"),
)
def echo(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """-lp summed over the observed tokens of a row (B,): the mean over all observed tokens of the mini-batch.

    Observed tokens are given to the policy, such as the answers of tools; each is in `observation_mask` in one row of
    its trajectory. Rows without a trained token do not count.
    """
    observed = torch.where(batch["observation_mask"], -logprobs, 0.0).sum(1)
    return observed * batch["observation_scale"], {}


@CONTROLS.register("adaptive")
class AdaptiveKL(Control):
    """beta *= 1 + clip(KL / target - 1, +-0.2) * rows / horizon. arXiv 1909.08593, section 2.2.

    Args:
        initial: beta at the start.
        target: the KL that it adapts to, in the unit of the KL that `update` gets; above 0.
        horizon: rows over which a KL that is off by 20 % or more moves beta by 20 %; above 0.
    """

    def __init__(self, *, initial: NonNegativeFloat, target: PositiveFloat, horizon: PositiveFloat) -> None:
        super().__init__(initial)
        self.target = target
        self.horizon = horizon

    def update(self, measured: float, rows: int) -> None:
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * rows / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef = state["coef"]


@CONTROLS.register("target_entropy")
class TargetEntropy(Control):
    """c goes up by `step` after a step whose entropy was below the target, and down by it after one above it, not
    below 0. The coefficient is c while the entropy is at or below the target, and 0 otherwise.

    Skywork-OR1, arXiv 2505.22312, section 3.2.5, with the entropy of the step before. There c may fall below 0, and
    would then punish entropy once it is too low.

    Args:
        initial: c, and the coefficient, at the start.
        target: the entropy per token that is kept.
        step: by which c moves.
    """

    def __init__(self, *, initial: NonNegativeFloat, target: PositiveFloat, step: PositiveFloat) -> None:
        super().__init__(initial)
        self.level = initial
        self.target = target
        self.step = step

    def update(self, measured: float, rows: int) -> None:
        if measured < self.target:
            self.level += self.step
        elif measured > self.target:
            self.level = max(self.level - self.step, 0.0)
        self.coef = self.level if measured <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "level": self.level}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef, self.level = state["coef"], state["level"]
