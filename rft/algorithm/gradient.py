"""The gradient that a plugin declares, on policy: current, old and rollout policy are equal.

`rft.algorithm.certificate` checks it by enumerating a tiny policy, in the tests and in `mode=verify`.
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
        target: the objective that is maximised, by its name in `rft.algorithm.certificate.objectives`. For an advantage
            or an aggregation the relation holds in expectation. For a loss it holds at every token of
            given rows if the target is one of the `SURROGATES` there, and in expectation otherwise.
        factor: of `scaled`, where it is known: the constant for groups of n rows.
        cosine: of `near`: of the angle, to three digits, on the enumerated policy and with the options of the yaml.
        note: half a sentence of explanation for the reader.
    """

    relation: Literal["exact", "scaled", "near", "none"]
    target: str = "reward"
    factor: Callable[[int], float] | None = None
    cosine: float | None = None
    note: str = ""
