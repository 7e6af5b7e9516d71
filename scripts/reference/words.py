"""Types, ranges, conditions and values of options in words."""

import json
import types
import typing
from typing import Annotated, Any, Literal, Union

from rft.conditions import ReadIf, ReadWith
from rft.ranges import MOST, Range
from rft.registry import spell

LONGEST = 70  # characters of a value; of a longer text its beginning is shown


def kind(annotation: Any) -> str:
    """A type, with the range of a number: `number, above 0, or null`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return ""
    if origin is Annotated:
        parts = [kind(arguments[0]), *(limits(fact) for fact in arguments[1:] if isinstance(fact, Range))]
        return ", ".join(filter(None, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(kind(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f"`{value(argument)}`" for argument in arguments)
    if origin is list or annotation is list:
        return f"list of {kind(arguments[0])}" if arguments else "list"
    if origin is tuple:
        return f"[{', '.join(kind(argument) for argument in arguments)}]"
    if origin is dict or annotation is dict:
        return f"mapping to {kind(arguments[1])}" if arguments and arguments[1] is not Any else "mapping"
    return spell(annotation)


def limits(bounds: Range) -> str:
    """The bounds of a number; a bound that only catches typing errors is left out."""
    if bounds.low is not None and bounds.high is not None and bounds.high < MOST:
        return f"{number(bounds.low)} to {number(bounds.high)}"
    words = [
        ("at least", bounds.low),
        ("above", bounds.above),
        ("at most", bounds.high if bounds.high != MOST else None),
        ("below", bounds.below),
    ]
    return ", ".join(f"{word} {number(bound)}" for word, bound in words if bound is not None)


def number(bound: float) -> str:
    """A bound without digits that say nothing: `0`, `0.01`, `10000000`."""
    return str(int(bound)) if bound == int(bound) else str(bound)


def condition(annotation: Any) -> str:
    """When a run reads an option; empty for one that every run reads."""
    facts = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is Annotated else ()
    words = []
    for fact in facts:
        if isinstance(fact, ReadIf):
            chosen = " or ".join(value(wanted) for wanted in fact.values)
            words.append(f"`{fact.option}={chosen}`" if fact.values else f"`{fact.option}`")
        elif isinstance(fact, ReadWith):
            words.append(fact.part)
    return f"Read only with {' and '.join(words)}." if words else ""


def value(content: Any) -> str:
    """A value as yaml has it, on one line."""
    text = content if isinstance(content, str) and content.isprintable() and content else json.dumps(content)
    text = text.replace("Infinity", ".inf")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
