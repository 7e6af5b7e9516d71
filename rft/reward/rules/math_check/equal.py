"""When two answers are equal, and one text for equal answers, for a majority vote.

The parser of math-verify reads formulas. Those that have values are equal where the values agree, so that no wrong
answer costs a simplification; all others, such as sets, are compared by math-verify.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

from rft.reward.rules.math_check.answer import UNION, Unreadable
from rft.reward.rules.math_check.formula import (
    DIGITS,
    answer_at,
    as_fraction,
    comparing,
    exact_text,
    formula,
    value_at,
    verified,
)
from rft.reward.rules.math_check.parse import CLOCK, Answer, Group, Relation, Scalar, Words
from rft.reward.rules.math_check.relations import (
    FLIPPED,
    by_name,
    different_names,
    has_names,
    is_name,
    name_of,
    of_each_name,
    stated,
)

POINTS = (11, -23, 38)  # where formulas with variables are evaluated: what differs at one is not equal


class Comparison:
    """Compares answers.

    Args:
        float_rounding: see `math`.
        percent_as_unit: see `math`.
    """

    def __init__(self, float_rounding: int, percent_as_unit: bool) -> None:
        self.float_rounding = float_rounding
        self.percent_as_unit = percent_as_unit

    def equal(self, gold: Answer, answer: Answer) -> bool:
        """Is an answer equal to the gold answer?

        Raises:
            Unreadable: the answer cannot be read; of the gold answer `canonical.checked` has shown that it can.
            Failed: a comparison of formulas raised an error.
        """
        gold, answer = _alternatives(gold), _alternatives(answer)
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self._relations(gold, answer)
        if isinstance(gold, Group) and isinstance(answer, Group):
            return self._groups(gold, answer)
        if isinstance(gold, Group) or isinstance(answer, Group):
            return self._mixed(gold, answer)
        if isinstance(gold, Words) or isinstance(answer, Words):
            return self._words(gold, answer)
        return self._scalars(gold, answer)

    def _words(self, gold: Answer, answer: Answer) -> bool:
        if isinstance(gold, Words) and isinstance(answer, Words):
            halves = [f"{gold.text} am", f"{gold.text} pm"] if CLOCK.fullmatch(gold.text) else []
            if answer.text in (gold.text, *halves):
                return True
        formulas = [Scalar(side.latex) if isinstance(side, Words) and side.latex else side for side in (gold, answer)]
        first, second = formulas
        return isinstance(first, Scalar) and isinstance(second, Scalar) and self._scalars(first, second)

    def _relations(self, gold: Answer, answer: Answer) -> bool:
        """Relations; a lone "x = 5" also equals 5, and "x > 3" the interval from 3."""
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._two_relations(gold, answer)
        if has_names(gold) or has_names(answer):  # "a=1, b=5" and "(b,a)=(1,5)"
            gold, answer = of_each_name(gold), of_each_name(answer)
            if isinstance(gold, Group) and isinstance(answer, Group):
                return self._groups(gold, answer)
        if isinstance(answer, Relation) and set(answer.signs) == {"="}:
            values = [side for side in answer.sides if isinstance(side, Scalar) and side.value is not None]
            if not all(self._scalars(values[0], other) for other in values):  # "17 = 18"
                return False
        first, second = stated(gold), stated(answer, given=True)
        if isinstance(first, Relation) or isinstance(second, Relation):
            return False
        return self.equal(first, second)

    def _two_relations(self, gold: Relation, answer: Relation) -> bool:
        turned = Relation(answer.signs[::-1].translate(FLIPPED), answer.sides[::-1])
        for other in (answer, turned):
            same = other.signs == gold.signs and len(other.sides) == len(gold.sides)
            if same and all(self.equal(a, b) for a, b in zip(gold.sides, other.sides, strict=True)):
                return True
        ends = [stated(side) for side in (gold, answer)]
        if not any(isinstance(end, Relation) for end in ends):
            return name_of(gold) == name_of(answer) and self.equal(ends[0], ends[1])
        if len(gold.signs) == len(answer.signs) == 1:
            return any(other.signs == gold.signs and _proportional(gold, other) for other in (answer, turned))
        return False

    def _mixed(self, gold: Answer, answer: Answer) -> bool:
        """A group and a single answer: a set of one is that one."""
        group, single = (gold, answer) if isinstance(gold, Group) else (answer, gold)
        assert isinstance(group, Group)
        if group.kind == "set" and len(group.items) == 1:
            return self.equal(group.items[0], single)
        if isinstance(single, Scalar) and group.kind in ("set", "union", "tuple") and single.value is None:
            return bool(as_set(group) is not None and as_set(group) == as_set(single))
        return False

    def _groups(self, gold: Group, answer: Group) -> bool:
        kinds = (gold.kind, answer.kind)
        if kinds == ("tuple", "tuple") or ("tuple" in kinds and "list" in kinds):
            ends = {side.ends for side in (gold, answer) if side.kind == "tuple"}
            bare = "list" in kinds or len(gold.items) != 2  # brackets then are no interval
            if (len(ends) > 1 and not bare) or ("list" in kinds and ends != {"()"} and len(gold.items) == 2):
                return False
            return self._in_order(by_name(gold), by_name(answer))
        if kinds == ("ratio", "ratio"):
            return self._ratios(gold.items, answer.items)
        if kinds == ("matrix", "matrix"):
            return self._in_order(gold.items, answer.items)
        if set(kinds) <= {"list", "set"}:
            points = all(isinstance(item, Group) for side in (gold, answer) for item in side.items)
            if "set" in kinds or points:  # a point that is written twice is one
                return self._all_in(gold.items, answer.items) and self._all_in(answer.items, gold.items)
            if different_names(gold) and not any(isinstance(item, Relation) for item in answer.items):
                return any(self._in_order(items, answer.items) for items in (gold.items, by_name(gold)))
            return self._in_any_order(gold.items, answer.items)
        if "union" in kinds:
            if kinds == ("union", "union") and self._in_any_order(gold.items, answer.items):
                return True
            return bool(as_set(gold) is not None and as_set(gold) == as_set(answer))
        return False

    def _in_order(self, gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
        return len(gold) == len(answer) and all(self.equal(a, b) for a, b in zip(gold, answer, strict=True))

    def _ratios(self, gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
        """Equal but for one factor: products across agree, and zeros stand in the same places."""
        if len(gold) != len(answer):
            return False
        zero = Scalar("0", Fraction(0))
        pairs = [*zip(gold, answer, strict=True)]
        if any(self.equal(zero, one) != self.equal(zero, other) for one, other in pairs):
            return False
        crossed = (((a, d), (c, b)) for (a, b), (c, d) in combinations(pairs, 2))
        return all(self._scalars(_product(*these), _product(*those)) for these, those in crossed)

    def _all_in(self, these: Sequence[Answer], those: Sequence[Answer]) -> bool:
        return all(any(self.equal(this, that) for that in those) for this in these)

    def _in_any_order(self, gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
        left = list(answer)
        for item in gold if len(gold) == len(answer) else []:
            found = next((place for place, other in enumerate(left) if self.equal(item, other)), None)
            if found is None:
                return False
            left.pop(found)
        return len(gold) == len(answer)

    def _scalars(self, gold: Scalar, answer: Scalar) -> bool:
        factor = Fraction(1)
        if gold.unit is not None and answer.unit is not None:
            if gold.unit.dimension != answer.unit.dimension:
                return False
            factor = answer.unit.size / gold.unit.size
        hundredths = [(gold.percent, answer.percent)]
        if self.percent_as_unit and gold.percent != answer.percent:
            hundredths.append((False, False))
        return any(self._values(gold, answer, factor, *percents) for percents in hundredths)

    def _values(self, gold: Scalar, answer: Scalar, factor: Fraction, *percents: bool) -> bool:
        first, second = (Fraction(1, 100) if percent else Fraction(1) for percent in percents)
        decimal = gold.decimal or answer.decimal
        if gold.value is not None and answer.value is not None:
            return self._close(gold.value * first, answer.value * second * factor, decimal)
        if gold.latex.replace(" ", "") == answer.latex.replace(" ", "") and first == second * factor:
            return True
        return self._formulas(gold, answer, first, second * factor, decimal)

    def _close(self, gold: Fraction, answer: Fraction, decimal: bool) -> bool:
        """Equal, or with decimals equal to so many places; below 0.1 zeros behind the point do not count."""
        if gold == answer or not decimal or gold == 0:
            return gold == answer
        zeros = min(0, math.floor(math.log10(abs(gold.numerator)) - math.log10(gold.denominator)) + 1)
        return 2 * abs(gold - answer) <= Fraction(10) ** (zeros - self.float_rounding)

    def _formulas(self, gold: Scalar, answer: Scalar, first: Fraction, second: Fraction, decimal: bool) -> bool:
        import sympy

        with comparing():
            expressions = formula(gold.latex), formula(answer.latex)
            factors = (sympy.Rational(factor.numerator, factor.denominator) for factor in (first, second))
            a, b = (e if f == 1 else e * f for e, f in zip(expressions, factors, strict=True))
            names = sorted(a.free_symbols | b.free_symbols, key=str)
            for point in POINTS if names else POINTS[:1]:
                values = {name: sympy.Rational(point + place, 7 + place) for place, name in enumerate(names)}
                numbers = [value_at(a, values), answer_at(b, values)]
                if None in numbers:
                    return numbers == [None, None] and verified(a, b)
                if not self._numbers(numbers[0], numbers[1], decimal):
                    return False
        return True

    def _numbers(self, gold: Any, answer: Any, decimal: bool) -> bool:
        """Complex numbers of `DIGITS` digits, whose last ten may be wrong."""
        import sympy

        least = max(abs(gold), abs(answer), sympy.Float(10) ** -20) * sympy.Float(10) ** (10 - DIGITS)
        for part in (sympy.re, sympy.im):
            a, b = part(gold), part(answer)
            if abs(a - b) > least and not (decimal and self._close(as_fraction(a), as_fraction(b), True)):
                return False
        return True


def _product(*factors: Answer) -> Scalar:
    numbers = [factor for factor in factors if isinstance(factor, Scalar)]
    values = [number.value for number in numbers if number.value is not None]
    latex = r" \cdot ".join(f"({number.latex})" for number in numbers)
    value = math.prod(values, start=Fraction(1)) if len(values) == len(numbers) else None
    return Scalar(latex, value, any(number.decimal for number in numbers))


def _alternatives(answer: Answer) -> Answer:
    """The union of intervals in place of "x < 1 or x > 2"; any other answer as it is."""
    if not (isinstance(answer, Group) and answer.kind == "list" and answer.ends == "or"):
        return answer
    parts = tuple(stated(item) for item in answer.items if isinstance(item, Relation) and "=" not in item.signs)
    same = len(parts) == len(answer.items) and len({name_of(item) for item in answer.items}) == 1
    return Group("union", parts) if same and all(isinstance(part, Group) for part in parts) else answer


def _proportional(gold: Relation, answer: Relation) -> bool:
    """Two equations, or inequalities of the same sign, of which one is a multiple of the other."""
    import sympy

    with comparing():
        differences = []
        for relation in (gold, answer):
            sides = [side for side in relation.sides if isinstance(side, Scalar)]
            if len(sides) < 2:
                return False
            left, right = (formula(side.latex) for side in sides)
            differences.append(left - right)
        if differences[1].is_zero or differences[0].is_zero:
            return False
        ratio = sympy.simplify(differences[0] / differences[1])
        return bool(ratio.is_number and ratio.is_nonzero and (gold.signs in "=≠" or ratio.is_positive))


def as_set(answer: Answer) -> Any:
    """An answer as a set of sympy; None where it is none.

    Raises:
        Unreadable: it looks like a set and is none.
    """
    import sympy

    try:
        if isinstance(answer, Scalar):
            expression = formula(answer.latex)
            if isinstance(expression, sympy.FiniteSet):
                return sympy.FiniteSet(*expression.args)
            if isinstance(expression, sympy.Complement) and isinstance(expression.args[1], sympy.FiniteSet):
                return sympy.Complement(expression.args[0], sympy.FiniteSet(*expression.args[1].args))
            return expression if isinstance(expression, sympy.Set) else None
        if not isinstance(answer, Group):
            return None
        if answer.kind == "union":
            parts = [as_set(item) for item in answer.items]
            return None if None in parts else sympy.Union(*parts)
        ends = [formula(item.latex) for item in answer.items if isinstance(item, Scalar)]
        if len(ends) < len(answer.items):
            return None
        if answer.kind == "set":
            return sympy.FiniteSet(*ends)
        if answer.kind == "tuple" and len(ends) == 2:
            return sympy.Interval(*ends, answer.ends[0] == "(", answer.ends[1] == ")")
        return None
    except (Unreadable, ValueError) as error:  # an interval of complex numbers
        raise Unreadable("it is no set") from error


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
