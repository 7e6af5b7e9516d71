"""Coefficients that are fixed, or updated after every step from a number that was measured in it."""

from collections.abc import Mapping
from typing import Any

from rft.algorithm.registries import CONTROLS
from rft.ranges import NonNegativeFloat, PositiveFloat
from rft.registry import convert


class Control:
    """A fixed coefficient of a term.

    Attributes:
        coef: as it stands now.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, measured: float, rows: int) -> None:
        """Updates the coefficient from the mean over the step and all ranks, measured on `rows` rows."""

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint: empty, as the coefficient is that of the yaml."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned."""


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


def build_control(node: Any, key: str) -> Control:
    """The control of a yaml node: a number is a fixed coefficient, a mapping names a control.

    Raises:
        ValueError: names the key of what does not fit; or the control changes, and a checkpoint would not save it.
    """
    if not isinstance(node, Mapping):
        return Control(convert(node, float, key))
    control: Control = CONTROLS.build(node, key)()
    if type(control).update is not Control.update and type(control).state_dict is Control.state_dict:
        raise ValueError(
            f"{key}.name={node['name']}: the control changes in `update` and has no `state_dict`, so that no "
            "checkpoint would save it; write `state_dict` and `load_state_dict`"
        )
    return control
