"""One text for equal answers, for a majority vote, and the check that all formulas of an answer can be read."""

from fractions import Fraction

from rft.reward.rules.math_check.clean import UNION
from rft.reward.rules.math_check.equal import as_set
from rft.reward.rules.math_check.formula import exact_text, formula
from rft.reward.rules.math_check.parse import Answer, Group, Relation, Scalar, Words
from rft.reward.rules.math_check.relations import is_name, stated


def checked(answer: Answer) -> None:
    """Reads all formulas of an answer.

    Raises:
        Unreadable: one cannot be read.
    """
    interval = stated(answer)
    if isinstance(interval, Group) and (interval.kind == "union" or interval.ends not in ("", "()")):
        as_set(interval)
    if isinstance(answer, Scalar):
        if answer.value is None:
            formula(answer.latex)
    elif isinstance(answer, Group | Relation):
        for part in answer.items if isinstance(answer, Group) else answer.sides:
            if not (isinstance(answer, Relation) and is_name(part)):
                checked(part)


def canonical(answer: Answer, percent_as_unit: bool) -> str:
    """The text of an answer. Units and the name of "x = 5" do not count; items of lists and sets are sorted.

    Raises:
        Unreadable: a formula cannot be read.
    """
    answer = stated(answer)
    if isinstance(answer, Words):
        return answer.text
    if isinstance(answer, Scalar):
        factor = Fraction(1, 100) if answer.percent and not percent_as_unit else Fraction(1)
        return str(answer.value * factor) if answer.value is not None else exact_text(answer.latex, factor)
    if isinstance(answer, Relation):
        sides = [canonical(side, percent_as_unit) for side in answer.sides]
        return sides[0] + "".join(f" {sign} {side}" for sign, side in zip(answer.signs, sides[1:], strict=True))
    if answer.kind == "ratio":
        return _ratio_text([canonical(item, percent_as_unit) for item in answer.items])
    items = [canonical(item, percent_as_unit) for item in answer.items]
    if answer.kind == "matrix":
        return f"[{', '.join(items)}]"
    if answer.kind == "tuple":
        return f"{answer.ends[0]}{', '.join(items)}{answer.ends[1]}"
    if len(items) == 1:
        return items[0]
    return f" {UNION} ".join(sorted(items)) if answer.kind == "union" else f"{{{', '.join(sorted({*items}))}}}"


def _ratio_text(items: list[str]) -> str:
    """1:2:3 of 2:4:6; numbers that are no fractions stay."""
    try:
        numbers = [Fraction(item) for item in items]
    except ValueError:
        return ":".join(items)
    first = next((number for number in numbers if number), Fraction(1))
    return ":".join(str(number / first) for number in numbers)
