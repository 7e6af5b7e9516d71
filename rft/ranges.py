"""Ranges of numbers. An option states its range with its type, and `rft.registry.convert` checks it:

    lr: Annotated[float, Range(low=0, high=10)]
    steps: PositiveInt

A plain `float` may be any finite number.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated

LARGEST = sys.float_info.max
MOST = 1_000_000_000  # of rows, tokens or seconds; a larger number is a typing error


@dataclass(frozen=True)
class Range:
    """Bounds of a number.

    Attributes:
        low, high: the smallest and the largest value; None for no bound.
        above, below: bounds that are out of the range themselves; None for no bound.
        infinite: infinity is in the range where no bound excludes it; nan never is.
        hint: what a message adds for a number outside of the range.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    infinite: bool = False
    hint: str = ""

    def broken(self, number: float) -> str:
        """The bound that a number breaks, and the hint; empty for a number in the range."""
        bounds = [
            ("finite", abs(number) < LARGEST or (self.infinite and abs(number) == math.inf)),
            (f"at least {self.low}", self.low is None or number >= self.low),
            (f"above {self.above}", self.above is None or number > self.above),
            (f"at most {self.high}", self.high is None or number <= self.high),
            (f"below {self.below}", self.below is None or number < self.below),
        ]
        found = next((text for text, kept in bounds if not kept), "")
        return f"{found}; {self.hint}" if found and self.hint else found


PositiveInt = Annotated[int, Range(low=1, high=MOST)]
NonNegativeInt = Annotated[int, Range(low=0, high=MOST)]
Steps = Annotated[int, Range(low=1, high=10_000_000)]
Seed = Annotated[int, Range(low=0, high=2**32 - 1)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
OpenFraction = Annotated[float, Range(above=0, below=1)]
ClipBound = Annotated[float, Range(low=0, infinite=True)]  # of a ratio's distance from 1; infinity: no clip
TopP = Annotated[float, Range(above=0, high=1, hint="1 turns it off")]
TopK = Annotated[int, Range(low=0, high=MOST, hint="0 turns it off")]
Seconds = Annotated[float, Range(above=0, high=MOST)]
SamplingTemperature = Annotated[float, Range(low=0.01, high=100, hint="the greedy evaluation needs no temperature")]
