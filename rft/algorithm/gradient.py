"""What a plugin says its gradient is, on policy: current, old and rollout policy are one. The enumeration of a tiny
policy in `rft.algorithm.certificate` proves it, in the tests and in `mode=verify`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gradient:
    """The relation of a plugin's expected gradient to that of an objective.

    Attributes:
        relation: `exact`: the same vector. `scaled`: a positive constant times it. `near`: `cosine` apart from it, on the
            enumerated policy. `none`: zero on average, whatever the target.
        target: the objective: `reward` (its mean), or another one that the certificate knows.
        factor: of `scaled`, where it is known: the constant for groups of n rows.
        cosine: of `near`: to three digits.
        note: what a reader should know, in half a sentence.
    """

    relation: Literal["exact", "scaled", "near", "none"]
    target: str = "reward"
    factor: Callable[[int], float] | None = None
    cosine: float | None = None
    note: str = ""
