"""Proves the gradient that a plugin declares, and that its result is invariant where it must be.

A policy of three symbols and two positions is enumerated, so there is no sampling noise: a gradient is exact to the
last digits of float64, or it is not.
"""

from dataclasses import dataclass

from rft.algorithm import Gradient
from rft.algorithm.certificate.invariances import invariances
from rft.algorithm.certificate.measure import GROUP_SIZE, Measured, measure
from rft.algorithm.certificate.sample import Kind
from rft.errors import FunctionError
from rft.registry import Plugin

__all__ = ["Certificate", "Kind", "Measured", "certificate"]

FACTOR_DIGITS = 1e-6
COSINE_DIGITS = 6e-4  # a cosine is declared to three digits


@dataclass(frozen=True)
class Certificate:
    """The declared and the measured properties of a plugin.

    Attributes:
        declared: its `gradient`, None if it declares none.
        measured: against the declared target; None where the shape of its result is wrong.
        checks: by name, whether the result is as independent as it must be.
    """

    declared: Gradient | None
    measured: Measured | None
    checks: dict[str, bool]

    @property
    def as_declared(self) -> bool:
        """The relation is the declared one, and so is its factor. A cosine may move with the options."""
        if self.declared is None or self.measured is None or self.declared.relation != self.measured.relation:
            return False
        factor = self.declared.factor
        return factor is None or abs(self.measured.factor / factor(GROUP_SIZE) - 1) < FACTOR_DIGITS

    @property
    def same_cosine(self) -> bool:
        """Where one is declared, it is the measured one."""
        if self.declared is None or self.measured is None or self.declared.cosine is None:
            return True
        return abs(self.measured.cosine - self.declared.cosine) < COSINE_DIGITS

    @property
    def holds(self) -> bool:
        """As declared, and all checks hold."""
        return self.as_declared and all(self.checks.values())


def certificate(plugin: Plugin, kind: Kind) -> Certificate:
    """Examines a plugin with its options.

    Raises:
        ValueError: the declared target is not known, or a column is read that `reads` does not name.
    """
    try:
        checks = invariances(plugin, kind)
    except FunctionError as error:
        if not isinstance(error.__cause__, KeyError):
            raise
        raise ValueError(f"{kind} {plugin.name!r}: name every column that it reads in `reads`: {error}") from error
    if not checks.get("shape", True):
        return Certificate(plugin.facts.gradient, None, checks)
    declared: Gradient | None = plugin.facts.gradient
    target = _usual(plugin, kind) if declared is None or declared.relation == "none" else declared.target
    return Certificate(declared, measure(plugin, kind, target), checks)


def _usual(plugin: Plugin, kind: Kind) -> str:
    """The target for a plugin that declares none."""
    if kind == "loss" and "advantages" not in plugin.facts.reads:
        return "value error" if plugin.facts.outputs == ("values",) else "likelihood"
    return "reward"
