"""Everything that the objects of a run hold: a digest of each number, text and tensor, by its place."""

import functools
import hashlib
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor

NUMBERS = str | bytes | bool | int | float | complex | None
OWN = ("rft", "tests", "torch.optim")  # packages whose objects are taken apart; plugins have no package
CONTAINERS = list | tuple | deque


def held(roots: Mapping[str, Any]) -> dict[str, str]:
    """The digest of every leaf that can be reached from some objects, by the attributes and keys that lead to it.

    Objects of other libraries than torch's optimizers are opaque: they have one leaf, the name of their class.
    """
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}  # keeps temporary objects, so that their ids are not used again
    rest: list[tuple[str, Any]] = list(reversed(roots.items()))
    while rest:
        place, thing = rest.pop()
        if (known := leaf(thing)) is not None:
            found[place] = known
        elif id(thing) not in seen:
            seen[id(thing)] = thing
            found[place] = type(thing).__name__
            rest += reversed([(f"{place}{name}", part) for name, part in parts(thing)])
    return found


def leaf(thing: Any) -> str | None:
    """The digest of what has no parts; None for what has some."""
    if isinstance(thing, NUMBERS | type | Path | types.ModuleType | types.BuiltinFunctionType):
        return repr(thing)
    if isinstance(thing, DTensor):
        thing = thing.to_local()
    if isinstance(thing, torch.Tensor):
        if thing.is_meta:
            return f"meta {thing.shape}"
        data = thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{thing.dtype} {tuple(thing.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(thing, np.ndarray):
        return f"{thing.dtype} {thing.shape} {hashlib.sha256(thing.tobytes()).hexdigest()[:16]}"
    if isinstance(thing, torch.Generator):
        return leaf(thing.get_state())
    if isinstance(thing, random.Random):
        return repr(hash(thing.getstate()))
    if isinstance(thing, itertools.count | np.generic):
        return repr(thing)
    return None


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object by what leads to them."""
    if isinstance(thing, TensorDict):
        yield from ((f"[{name!r}]", column) for name, column in thing.items())
    elif isinstance(thing, Mapping) and not type(thing).__module__.startswith("transformers."):
        for number, (key, value) in enumerate(thing.items()):
            yield f"[{key!r}]" if isinstance(key, NUMBERS | tuple) else f"[key {number}]", value
    elif isinstance(thing, CONTAINERS):
        yield from ((f"[{number}]", part) for number, part in enumerate(thing))
    elif isinstance(thing, set | frozenset):
        yield "{}", sorted(map(repr, thing))
    elif isinstance(thing, functools.partial):
        yield from (("()", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from ((".__self__", thing.__self__), (".__func__", thing.__func__))
    elif isinstance(thing, types.FunctionType):
        if own(thing.__module__):
            cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
            yield from ((f" {name}", cell.cell_contents) for name, cell in cells)
            yield from ((f".{name}", value) for name, value in vars(thing).items())
    elif isinstance(thing, nn.Module):
        yield from ((f".{name}", tensor) for name, tensor in (*thing.named_parameters(), *thing.named_buffers()))
        yield from ((f".{name}.grad", parameter.grad) for name, parameter in thing.named_parameters())
        if own(type(thing).__module__):
            yield from ((f".{name}", value) for name, value in vars(thing).items() if name != "_modules")
    elif own(type(thing).__module__):
        yield from attributes(thing)


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, with those of `__slots__`."""
    slots = (name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()))
    named = {name: getattr(thing, name) for name in slots if name != "__dict__" and hasattr(thing, name)}
    yield from ((f".{name}", value) for name, value in (named | getattr(thing, "__dict__", {})).items())


@functools.cache
def own(module: str) -> bool:
    """Whether objects of a module are taken apart: those of the project, of torch's optimizers and of plugins."""
    if module.split(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or "site-packages"
    return any(module == name or module.startswith(f"{name}.") for name in OWN) or "site-packages" not in file


def of_modules() -> dict[str, Any]:
    """What the modules of the project and of plugins hold beside classes, functions and texts, and the generators."""
    found: dict[str, Any] = {"torch.rng": torch.get_rng_state(), "numpy.rng": repr(np.random.get_state())}
    found["random.rng"] = repr(hash(random.getstate()))
    kinds = int | float | list | dict | set | deque | torch.Tensor
    for name, module in sorted(sys.modules.items()):
        if own(name) and name.split(".")[0] not in ("tests", "torch"):
            for key, value in list(vars(module).items()):
                if not key.startswith("__") and isinstance(value, kinds):
                    found[f"{name}:{key}"] = value
    return found


def lost(start: Mapping[str, str], end: Mapping[str, str], resumed: Mapping[str, str]) -> list[str]:
    """The places that changed from `start` to `end`, and that a resume did not restore."""
    changed = (place for place in {**start, **end} if start.get(place) != end.get(place))
    return [place for place in changed if end.get(place) != resumed.get(place)]
