"""Plugins that remember earlier steps although no checkpoint saves what they remember."""

import hashlib
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft.registry import Plugin

CONTAINERS = list | tuple | set | deque


class UnsavedMemory:
    """Finds numbers that plugins without a `state_dict` change between steps.

    They are looked for in the attributes of an object, and in the variables of its module and of enclosing functions
    that a function uses.

    Args:
        plugins: functions and objects, by what messages call them.
    """

    def __init__(self, plugins: Mapping[str, Any]) -> None:
        self._plugins = plugins
        self._before = self._digests()

    def changed(self) -> list[str]:
        """A message for each variable that has changed since the run began and is in no message yet."""
        messages = []
        for place, digest in self._digests().items():
            if place in self._before and self._before[place] != digest:
                title, name = place
                del self._before[place]
                messages.append(
                    f"{title} changes {name} while it trains, and no checkpoint saves it: a resumed run begins with "
                    "its first value and trains another model. Keep it in the state of a shaping, in a controller, a "
                    "source or a model, as docs/extending.md shows"
                )
        return messages

    def _digests(self) -> dict[tuple[str, str], str]:
        return {
            (title, name): _digest(value)
            for title, plugin in self._plugins.items()
            for name, value in variables(plugin, set())
            if _holds_numbers(value)
        }


def variables(plugin: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The variables of an object or a function, of the functions that the object has, and of those of the same module
    that the function calls.

    Args:
        seen: ids of the functions that are left out; gets the others.
    """
    used, place, module = vars(plugin), "its attribute ", None
    if isinstance(plugin, types.FunctionType):
        outer, module = inspect.getclosurevars(plugin), plugin.__module__
        used, place = {**outer.nonlocals, **outer.globals, **used}, f"the variable {module}."
    for name, value in used.items():
        called = value.function if isinstance(value, Plugin) else value
        if not isinstance(called, types.FunctionType):
            yield f"{place}{name}", value
        elif module in (None, called.__module__) and id(called) not in seen:
            seen.add(id(called))
            yield from variables(called, seen)


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a number, a tensor, an array or a container: what may hold a memory of steps."""
    return isinstance(value, int | float | Tensor | np.ndarray | Mapping | CONTAINERS) and not isinstance(value, bool)


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in _texts(value):
        digest.update(text)
    return digest.hexdigest()


def _texts(value: Any) -> Iterable[bytes]:
    """What is in a value, without the insides of objects."""
    if isinstance(value, Tensor):
        yield value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key).encode()
            yield from _texts(part)
    elif isinstance(value, CONTAINERS):
        yield f"{type(value).__name__} {len(value)}".encode()
        for part in value:
            yield from _texts(part)
    elif isinstance(value, str | bytes | int | float | None):
        yield repr(value).encode()
