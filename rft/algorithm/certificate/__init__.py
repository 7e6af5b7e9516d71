"""Proves what a plugin states about its gradient, and that its result depends on nothing that it should not.

A policy of three symbols and two positions is enumerated, so there is no sampling noise: a gradient is exact to the
last digits of float64, or it is not.
"""

from dataclasses import dataclass

from rft.algorithm.certificate.evaluate import Kind
from rft.algorithm.certificate.invariances import invariances
from rft.algorithm.certificate.measure import GROUP_SIZE, Measured, measure
from rft.algorithm.gradient import Gradient
from rft.registry import Plugin

__all__ = ["Certificate", "Kind", "Measured", "certificate"]

COSINE_DIGITS = 6e-4  # a cosine is declared to three digits


@dataclass(frozen=True)
class Certificate:
    """What a plugin states and what it does.

    Attributes:
        declared: its `gradient`, None where it states nothing.
        measured: against the declared target; None where the shape of its result is wrong.
        checks: by name, whether the result is as independent as it must be.
    """

    declared: Gradient | None
    measured: Measured | None
    checks: dict[str, bool]

    @property
    def as_declared(self) -> bool:
        """The measured gradient is the declared one."""
        if self.declared is None or self.measured is None or self.declared.relation != self.measured.relation:
            return False
        if self.declared.relation == "scaled" and self.declared.factor is not None:
            return abs(self.measured.factor / self.declared.factor(GROUP_SIZE) - 1) < 1e-6
        if self.declared.relation == "near":
            return self.declared.cosine is not None and abs(self.measured.cosine - self.declared.cosine) < COSINE_DIGITS
        return True

    @property
    def holds(self) -> bool:
        """As declared, and all checks hold."""
        return self.as_declared and all(self.checks.values())


def certificate(plugin: Plugin, kind: Kind) -> Certificate:
    """Examines a plugin with its options.

    Raises:
        ValueError: the declared target is not known.
    """
    checks = invariances(plugin, kind)
    if not checks["shape"]:
        return Certificate(plugin.facts.gradient, None, checks)
    declared: Gradient | None = plugin.facts.gradient
    target = _usual(plugin, kind) if declared is None or declared.relation == "none" else declared.target
    return Certificate(declared, measure(plugin, kind, target), checks)


def _usual(plugin: Plugin, kind: Kind) -> str:
    """The target of a plugin that states none."""
    if kind == "loss" and "advantages" not in plugin.facts.reads:
        return "value error" if plugin.facts.outputs == ("values",) else "likelihood"
    return "reward"
