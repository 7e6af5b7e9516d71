"""Registries of functions, classes named by `_target_`, and the check of yaml options against signatures.

Every node of the resolved config is consumed by exactly one signature: a registered function, the `__init__` of a
`_target_`, or a dataclass. An unknown or a missing option is an error that names the yaml key and the cure. This module
does not import torch, so configs can be checked before slow imports.
"""

import dataclasses
import importlib
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union

from rft.conditions import Absent, signature_of, unread_fields, unread_options
from rft.errors import Problems, did_you_mean, messages_of, naming
from rft.imports import import_function, is_dotted
from rft.ranges import Range

FINITE = Range()


class Plugin:
    """A registered function with its yaml options bound and its facts resolved.

    An error that a user's function raises is a FunctionError, which names the function and the line.

    Attributes:
        name: the name under which it is registered.
        title: what messages call it.
        options: its yaml options, checked against its signature.
        facts: what it reads, writes and needs (one attribute per fact of its registry).
        function: without its options.
    """

    def __init__(
        self, name: str, kind: str, function: Callable, options: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        self.name = name
        self.title = f"the {kind} {name!r}"
        self.options = options
        self.facts = types.SimpleNamespace(**facts)
        self.function = function

    def __call__(self, *args: Any, **supplied: Any) -> Any:
        """Calls the function with its options and those keyword arguments that it names."""
        return _call(self.title, self.function, args, {**supplied, **self.options})

    def call(self, fact: str, *args: Any, **supplied: Any) -> Any:
        """Calls a fact that is a function with those options and keyword arguments that it names."""
        return _call(f"{fact} of {self.title}", vars(self.facts)[fact], args, {**supplied, **self.options})


def _call(title: str, function: Callable, args: tuple[Any, ...], known: Mapping[str, Any]) -> Any:
    """Calls a function with the arguments, and those of the known values that its signature names."""
    with naming(title, function):
        names = _names(function)
        return function(*args, **{name: value for name, value in known.items() if name in names})


@cache  # to read a signature takes longer than most calls
def _names(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class Registry:
    """Functions by name, each with facts about itself.

    Args:
        kind: what messages call an entry ("loss").
        supplied: keyword arguments that the caller passes at call time; they are not yaml options.
        functions: the facts whose value is a function.
        imports: whether a name with a dot, `module.function`, is imported; not where names come with the data.
        facts: every fact that an entry may state, with its default. Any but the `functions` may be given as a callable
            of options of the entry, which get those that it names. Every registry has the fact `fault`: a message
            about wrong options ("option=value: what it must be"), or None.
    """

    def __init__(
        self,
        kind: str,
        *,
        supplied: tuple[str, ...] = (),
        functions: tuple[str, ...] = (),
        imports: bool = True,
        **facts: Any,
    ) -> None:
        self.kind = kind
        self.imports = imports
        self.supplied = supplied
        self.functions = functions
        self.facts: dict[str, Any] = {"fault": None, **facts}
        self._entries: dict[str, tuple[Callable, dict[str, Any]]] = {}

    def register(self, name: str, **facts: Any) -> Callable:
        """Decorator: `@LOSSES.register("ppo_clip", reads=("advantages",))`."""
        unknown = set(facts) - set(self.facts)
        assert not unknown, f"{self.kind} {name!r} states unknown facts {sorted(unknown)}; known: {sorted(self.facts)}"

        def add(function: Callable) -> Callable:
            known = self._entries.get(name)
            # at the same place, the module was imported again
            if known is not None and _place(known[0]) != _place(function):
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice: as {_place(known[0])} and as {_place(function)}; "
                    "give one of them another name"
                )
            self._entries[name] = (function, facts)
            return function

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._entries)

    def function(self, name: str) -> Callable:
        """The function that is registered under a name, without options."""
        return self._entries[name][0]

    def knows(self, name: Any, where: str) -> bool:
        """Whether a name of the yaml has a function. One with a dot is imported: it has the facts with which its module
        registers the function, or their defaults.

        Args:
            where: begins messages: the key and its value.

        Raises:
            ValueError: the module of a name with a dot cannot be imported, or has no such function.
        """
        dotted = isinstance(name, str) and "." in name and is_dotted(name)
        if self.imports and dotted and name not in self._entries:
            function = import_function(name, where, self.kind)
            known = {entry: facts for entry, facts in self._entries.values()}
            self._entries[name] = (function, known.get(function, {}))
        return isinstance(name, str) and name in self._entries

    def build(self, node: Any, key: str) -> Plugin:
        """Binds a yaml node `{name: ..., option: ...}` to its function.

        Raises:
            ValueError: the name is unknown or cannot be imported, or an option is unknown, missing, of a wrong type or
                out of its range. The message names the key.
        """
        if not isinstance(node, Mapping) or "name" not in node:
            raise ValueError(f"{key}: expected a {self.kind} as {{name: ..., options}}, got {node!r}")
        name = node["name"]
        if not self.knows(name, f"{key}.name={name}"):
            raise ValueError(
                f"{key}.name: no {self.kind} is called {name!r}{did_you_mean(str(name), self._entries)} "
                f"(known: {', '.join(self.names())}; import a module of your own with plugins: [module])"
            )
        function, stated = self._entries[name]
        options = {k: v for k, v in node.items() if k != "name"}
        options = take(options, function, key, f"{self.kind} {name!r}", self.supplied)
        facts = self.facts | stated
        for fact, value in facts.items():  # the fault is the first: others may need options without one
            if callable(value) and fact not in self.functions:
                facts[fact] = _call(f"{fact} of the {self.kind} {name!r}", value, (), options)
            if fact == "fault" and facts[fact] is not None:
                raise ValueError(f"{key}.{facts[fact]}")
        return Plugin(name, self.kind, function, options, facts)


class Target:
    """A class named by `_target_` with its yaml options checked, ready to be built.

    Attributes:
        factory: the class, or a function that makes the object.
        options: an object of the dataclass that the class names as its `Options`, which is also what its constructor
            takes as `options`; of a class without one, and of a function, the keyword arguments.

    Raises:
        ValueError: the class cannot be found, or an option does not fit its signature; names the key.
    """

    def __init__(self, node: Any, key: str, supplied: tuple[str, ...] = ()) -> None:
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ValueError(f"{key}: expected a class as {{_target_: module.Class, options}}, got {node!r}")
        self.key = key
        path = str(node["_target_"])
        module, _, name = path.rpartition(".")
        try:
            self.factory = vars(importlib.import_module(module))[name]
        except (ImportError, KeyError, TypeError, ValueError) as error:  # TypeError: a path that begins with a dot
            raise ValueError(f"{key}._target_: {path!r} cannot be imported ({error})") from error
        options = {k: v for k, v in node.items() if k != "_target_"}
        owner = options_class(self.factory)
        self.options: Any = (
            take(options, self.factory, key, name, supplied)
            if owner is None
            else owner(**take(options, owner, key, name))
        )
        self._takes = set(inspect.signature(self.factory).parameters)

    def unread(self, absent: Absent) -> dict[str, str]:
        """The options that a run does not read; see `rft.conditions.unread_options`."""
        if isinstance(self.options, dict):
            return unread_options(self.factory, self.options, self.key, absent)
        return unread_fields(self.options, self.key, absent)

    def build(self, **supplied: Any) -> Any:
        """Builds the object with those keyword arguments that it takes; the others are dropped."""
        options = self.options if isinstance(self.options, dict) else {"options": self.options}
        taken = {k: v for k, v in supplied.items() if k in self._takes and k not in options}
        return self.factory(**taken, **options)


def options_class(factory: Callable) -> type | None:
    """The dataclass of the options of a class, its own or inherited; None for a class or a function without one."""
    kinds = factory.__mro__ if isinstance(factory, type) else ()
    return next((vars(kind)["Options"] for kind in kinds if "Options" in vars(kind)), None)


def _place(function: Callable) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def take(options: Mapping, function: Callable, key: str, title: str, supplied: tuple[str, ...] = ()) -> dict[str, Any]:
    """Checks a yaml node against a signature and returns the keyword arguments.

    Args:
        options: the node.
        function: a function, a class or a dataclass.
        key: the yaml key of the node, for messages.
        title: what messages call the function.
        supplied: parameters that the caller passes at call time; they are not yaml options.

    Raises:
        Problems: options are unknown, missing, or do not fit the annotation.
    """
    result, messages = validate(options, function, key, title, supplied)
    if messages:
        raise Problems(messages)
    return result


def validate(
    options: Mapping, function: Callable, key: str, title: str, supplied: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[str]]:
    """As `take`, but returns the keyword arguments that fit, and a message for every other option."""
    parameters, hints = signature_of(function)
    keyword = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not isinstance(function, type):  # positional arguments of a function are data, not options
        keyword = [p for p in keyword if p.kind is p.KEYWORD_ONLY]
    taken = {p.name: p for p in keyword if p.name not in supplied}
    prefix = f"{key}." if key else ""
    messages: list[str] = []
    unknown = [name for name in options if name not in taken]
    for name in unknown:
        takes = ", ".join(taken) or "no options"
        messages.append(f"{prefix}{name}: {title} takes {takes}{did_you_mean(str(name), taken)}")
    result = {}
    for name, parameter in taken.items():
        annotation = hints.get(name, Any)
        if name in options:
            try:
                result[name] = convert(options[name], annotation, f"{prefix}{name}")
            except ValueError as error:
                messages += messages_of(error)
        elif parameter.default is parameter.empty and not unknown:  # an unknown option may be the missing one, misspelt
            needs = f"{title} needs it; add `{name}: <{spell(annotation)}>`"
            messages.append(f"{prefix}{name} is missing: {needs}")
    return result, messages


def convert(value: Any, annotation: Any, key: str, bounds: Range = FINITE) -> Any:
    """Returns the value if it fits the annotation; a mapping becomes the dataclass that is annotated.

    Args:
        bounds: of a number; those of an `Annotated` number take their place.

    Raises:
        ValueError: names the key, what was expected and what was found.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin is Annotated:
        bounds = next((fact for fact in arguments[1:] if isinstance(fact, Range)), bounds)
        return convert(value, arguments[0], key, bounds)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        rest = [a for a in arguments if a is not type(None)]
        if len(rest) == 1:
            return convert(value, rest[0], key)
        for choice in rest:
            try:
                return convert(value, choice, key)
            except ValueError:
                continue
    elif origin is Literal:
        if any(value == a and (isinstance(value, str) or type(value) is type(a)) for a in arguments):  # True is not 1
            return value
        known = [str(a) for a in arguments]
        raise ValueError(f"{key}: expected one of {', '.join(known)}, got {value!r}{did_you_mean(str(value), known)}")
    elif dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if isinstance(value, Mapping):
            return annotation(**take(value, annotation, key, annotation.__name__))
    elif origin in (list, tuple) or annotation in (list, tuple):
        fixed = origin is tuple and Ellipsis not in arguments
        if isinstance(value, list | tuple) and not (fixed and len(value) != len(arguments)):
            kinds = arguments if fixed else itertools.repeat(arguments[0] if arguments else Any)
            parts = (convert(v, kind, f"{key}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=False)))
            return (origin or annotation)(parts)
    elif origin is dict or annotation is dict:
        if isinstance(value, Mapping):
            kind = arguments[1] if arguments else Any
            return {k: convert(v, kind, f"{key}.{k}") for k, v in value.items()}
    elif annotation is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(_in_range(value, bounds, key))
    elif annotation is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return _in_range(value, bounds, key)
    elif isinstance(value, annotation):
        return value
    raise ValueError(f"{key}: expected {spell(annotation)}, got {value!r}")


def _in_range(value: float, bounds: Range, key: str) -> float:
    if broken := bounds.broken(value):
        raise ValueError(f"{key}={value}: it must be {broken}")
    return value


def spell(annotation: Any) -> str:
    """An annotation in words for messages: `number or null`."""
    if typing.get_origin(annotation) is Annotated:
        return spell(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple:
        return f"[{', '.join(spell(a) for a in typing.get_args(annotation))}]"
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(spell(a) for a in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(a) for a in typing.get_args(annotation))
    names = {type(None): "null", float: "number", int: "whole number", bool: "true or false", str: "text"}
    return names.get(annotation) or (annotation.__name__ if isinstance(annotation, type) else str(annotation))
