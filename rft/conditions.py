"""When a run reads an option. The option states it with its type, and `unread_options` finds those that are not read:

    final_lr: Annotated[Fraction, ReadIf("schedule", "linear", "cosine")]
    top_p: Annotated[float, Range(above=0, high=1), ReadWith(SAMPLED)]

An option without a condition is always read.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any

SAMPLED = "sampled texts"  # that train
GIVEN = "given texts"  # that train
ANSWERS = "answers to held-out prompts"
GENERATION = "generated texts"  # that train, or answers
SERVED_MODEL = "a served model"
SERVED_REWARD = "served reward terms"
Absent = Callable[[str], str]  # why a run lacks a part; empty for a part that it has


@dataclasses.dataclass(frozen=True, init=False)
class ReadIf:
    """The option is read only with certain values of another option of the same node.

    Attributes:
        option: the other option.
        values: with one of these; empty: with any but null, false, 0 and an empty one.
    """

    option: str
    values: tuple[Any, ...]

    def __init__(self, option: str, *values: Any) -> None:
        object.__setattr__(self, "option", option)
        object.__setattr__(self, "values", values)

    def holds(self, value: Any) -> bool:
        """Whether the option is read with this value of the other one."""
        return value in self.values if self.values else bool(value)


@dataclasses.dataclass(frozen=True)
class ReadWith:
    """The option is read only in runs with a certain part.

    Attributes:
        part: one of the names above; `column <name>`, a column that the algorithm reads; or `field <name>`, a field of
            the rows of a data set.
    """

    part: str


def unread_options(function: Callable, options: Mapping[str, Any], key: str, absent: Absent) -> dict[str, str]:
    """The options that a run does not read, nested dataclasses included.

    Args:
        function: the function, class or dataclass that takes the options.
        options: their values, converted to their types.
        key: the yaml key of the node; empty for the root.
        absent: says why the run lacks a part.

    Returns:
        The reason for every such option, by its yaml key.
    """
    _, hints = signature_of(function)
    prefix = f"{key}." if key else ""
    found: dict[str, str] = {}
    for name, value in options.items():
        for condition in _conditions(hints.get(name, Any)):
            if isinstance(condition, ReadIf) and not condition.holds(options[condition.option]):
                found[prefix + name] = f"{prefix}{condition.option}={options[condition.option]}"
            if isinstance(condition, ReadWith) and (reason := absent(condition.part)):
                found[prefix + name] = reason
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= unread_fields(value, prefix + name, absent)
    return found


@cache
def signature_of(function: Callable) -> tuple[list[inspect.Parameter], dict[str, Any]]:
    """The parameters and the annotations of a function or a class, which take most of the time of checking a config."""
    annotated = attrgetter("__init__")(function) if isinstance(function, type) else function
    return [*inspect.signature(function).parameters.values()], typing.get_type_hints(annotated, include_extras=True)


def unread_fields(instance: Any, key: str, absent: Absent) -> dict[str, str]:
    """As `unread_options`, of the fields of a dataclass."""
    return unread_options(type(instance), fields_of(instance), key, absent)


def fields_of(instance: Any) -> dict[str, Any]:
    """The constructor arguments of a dataclass instance, not converted."""
    return {name: vars(instance)[name] for name in inspect.signature(type(instance)).parameters}


def _conditions(annotation: Any) -> Iterator[ReadIf | ReadWith]:
    """The conditions of an option, also those of a type that may be null."""
    if typing.get_origin(annotation) is Annotated:
        yield from (fact for fact in annotation.__metadata__ if isinstance(fact, ReadIf | ReadWith))
