"""What a plugin says its gradient is, on policy: current, old and rollout policy are one. The enumeration of a tiny
policy in `rft.algorithm.certificate` proves it, in the tests and in `mode=verify`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gradient:
    """The relation of a plugin's gradient to that of an objective.

    Attributes:
        relation: `exact`: the same vector. `scaled`: a positive constant times it. `near`: an angle apart from it.
            `none`: zero, whatever the target.
        target: what is maximised, by its name in `rft.algorithm.certificate.objectives`. An advantage or an aggregation
            has it in expectation; a loss has it token by token for given advantages, where that can be said of it.
        factor: of `scaled`, where it is known: the constant for groups of n rows.
        cosine: of `near`: of the angle, to three digits, on the enumerated policy and with the options of the yaml.
        note: what a reader should know, in half a sentence.
    """

    relation: Literal["exact", "scaled", "near", "none"]
    target: str = "reward"
    factor: Callable[[int], float] | None = None
    cosine: float | None = None
    note: str = ""
