"""What a relation states of the name in it: x = 5 states 5, (a, b) = (1, 5) states (1, 5), x > 3 an interval."""

from collections.abc import Sequence

from rft.reward.rules.math_check import quantities
from rft.reward.rules.math_check.parse import Answer, Group, Relation, Scalar, Words

FLIPPED = str.maketrans("<>≤≥", "><≥≤")


def is_name(side: Answer) -> bool:
    """Is the side of a relation a name, words, names in round brackets, or a ratio of names?"""
    if isinstance(side, Group):
        return (side.ends == "()" or side.kind == "ratio") and all(map(is_name, side.items))
    named = isinstance(side, Scalar) and side.value is None and quantities.is_name(side.latex)
    return isinstance(side, Words) or named


def name_of(side: Answer) -> str:
    """The first name among the sides of a relation, or a name itself, in one writing; "" where there is none."""
    if isinstance(side, Relation):
        return next((name_of(part) for part in side.sides if is_name(part)), "")
    if isinstance(side, Group):
        return ",".join(map(name_of, side.items))
    return quantities.bare_name(side.latex if isinstance(side, Scalar) else side.text)


def stated(answer: Answer, given: bool = False) -> Answer:
    """What a relation states of its name: 5 of "x = 5", (3, oo) of "x > 3"; the relation itself where it is no such.

    Args:
        answer: any other than a relation is returned.
        given: the relation is in a response: "x + y = 5" states 5 too, for a question that asks for x + y.
    """
    if not isinstance(answer, Relation):
        return answer
    names = [is_name(side) for side in answer.sides]
    if set(answer.signs) == {"="}:
        if names[-1] and not any(names[:-1]):
            return answer.sides[0]
        return answer.sides[-1] if names[0] or given else answer
    if "=" in answer.signs or sum(names) != 1 or "≠" in answer.signs:
        return answer
    infinite = Scalar(r"-\infty"), Scalar(r"\infty")
    if len(answer.sides) == 2:
        place = names.index(True)
        sign, end = answer.signs, answer.sides[1 - place]
        sign = sign if place == 0 else sign.translate(FLIPPED)
        if sign in "<≤":
            return Group("tuple", (infinite[0], end), "(" + (")" if sign == "<" else "]"))
        return Group("tuple", (end, infinite[1]), ("(" if sign == ">" else "[") + ")")
    if len(answer.sides) == 3 and names[1]:
        low, _, high = answer.sides
        signs = answer.signs
        if set(signs) <= set(">≥"):
            low, high, signs = high, low, signs[::-1].translate(FLIPPED)
        if set(signs) <= set("<≤"):
            return Group("tuple", (low, high), ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"))
    return answer


def has_names(answer: Answer) -> bool:
    """Is an answer several, with relations among them?"""
    return isinstance(answer, Group) and any(isinstance(item, Relation) for item in answer.items)


def of_each_name(answer: Answer) -> Answer:
    """The list a = 1, b = 5 of "(a, b) = (1, 5)"; any other answer as it is."""
    if not isinstance(answer, Relation) or answer.signs != "=":
        return answer
    names, values = answer.sides
    if not isinstance(names, Group) or not isinstance(values, Group) or not is_name(names):
        return answer
    if {names.kind, values.kind} != {"tuple"} or len(names.items) != len(values.items):
        return answer
    return Group("list", tuple(Relation("=", sides) for sides in zip(names.items, values.items, strict=True)))


def by_name(group: Group) -> Sequence[Answer]:
    """The items of a group; those of "y=2, x=1" in the order of their letters, as in (1, 2)."""
    names = [name_of(item) if isinstance(item, Relation) else "" for item in group.items]
    if group.kind == "list" and all(len(name) == 1 for name in names):
        return [group.items[place] for place in sorted(range(len(names)), key=names.__getitem__)]
    return group.items


def different_names(group: Group) -> bool:
    """Are the items values of different names, as "x = 3, y = -1"? Those of "x_1 = 3, x_2 = -1" have one."""
    names = [name_of(item).partition("_")[0] if isinstance(item, Relation) else "" for item in group.items]
    return "" not in names and len({*names}) == len(names) > 1
