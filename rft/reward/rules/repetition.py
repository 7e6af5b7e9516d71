"""A penalty of responses that repeat themselves."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from rft.ranges import Range
from rft.reward.term import REWARDS


@REWARDS.register("repetition")
def repetition(
    response: str,
    row: Mapping[str, Any],
    *,
    size: Annotated[int, Range(low=1, high=100)],
    unit: Literal["words", "characters"],
) -> float:
    """Minus the share of n-grams that repeat an earlier one, 1 - different / all; from -1 to 0.

    The repetition penalty of arXiv 2502.03373, appendix C.2, where the n-grams are of tokens. The `weight` of the term
    is the largest penalty. A response of fewer than `size` units repeats nothing: 0. Case does not count.

    Args:
        size: n, the units of an n-gram.
        unit: "words": what white space separates; "characters": all but white space, for texts without blanks.
    """
    text = response.lower()
    units = text.split() if unit == "words" else [letter for letter in text if not letter.isspace()]
    count = len(units) - size + 1
    if count < 1:
        return 0.0
    return len({tuple(units[start : start + size]) for start in range(count)}) / count - 1.0
