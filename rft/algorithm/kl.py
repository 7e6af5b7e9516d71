"""Estimates of the KL divergence from sampled tokens, and control of its coefficient."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rft.algorithm.ratio import LARGEST_LOG_RATIO
from rft.algorithm.registries import KL_CONTROLS
from rft.registry import convert


def k1(d: Tensor) -> Tensor:
    """d. Unbiased, and negative as often as not. (http://joschu.net/blog/kl-approx.html, for k1 to k3.)"""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2. Biased, low variance."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Unbiased and never negative. d is clamped to at least -20, so exp does not overflow."""
    d = d.clamp(min=-LARGEST_LOG_RATIO)  # in both places: d alone would push a token the wrong way beyond the clamp
    return (-d).exp() - 1 + d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """The KL per token that goes into the reward, of d = logprobs - ref_logprobs; float32 at least.

    Args:
        logprobs, ref_logprobs: (B, T), of the tokens that the first policy sampled.
        estimator: k1 makes the reward exact; the others are there for comparison with published runs.
    """
    d = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) - ref_logprobs
    return ESTIMATORS[estimator](d)  # (B, T)


class KLControl:
    """A fixed coefficient of the KL.

    Attributes:
        coef: beta, as it stands now.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, rows: int) -> None:
        """Told the mean KL of the step over all ranks and how many rows it was measured on."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds: nothing, as the yaml says it all."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes up what `state_dict` gave."""


@KL_CONTROLS.register("adaptive")
class AdaptiveKL(KLControl):
    """beta *= 1 + clip(KL / target - 1, +-0.2) * rows / horizon. arXiv 1909.08593, section 2.2.

    Args:
        initial: beta at the start.
        target: the KL that it steers for, in the unit in which `update` is told the KL; above 0.
        horizon: rows over which a KL that is off by 20 % or more moves beta by 20 %; above 0.

    Raises:
        ValueError: `target` or `horizon` is not above 0.
    """

    def __init__(self, *, initial: float, target: float, horizon: float) -> None:
        for name, number in (("target", target), ("horizon", horizon)):
            if number <= 0:
                raise ValueError(f"{name}: the adaptive KL control needs a number above 0, got {number}")
        super().__init__(initial)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rows: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * rows / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef = state["coef"]


def build_control(node: Any, key: str) -> KLControl:
    """The control that a yaml node asks for: a number is a fixed coefficient, a mapping names a KL control.

    Raises:
        ValueError: names the key of what does not fit.
    """
    if not isinstance(node, Mapping):
        return KLControl(convert(node, float, key))
    plugin = KL_CONTROLS.build(node, key)
    try:
        return plugin()
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error
