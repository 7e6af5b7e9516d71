"""The options of every class and function that a config can name, and the values that the yaml files give them."""

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import attrgetter
from typing import Annotated, Any

from reference.yaml_files import OptionFile, option_files
from rft.actor.actor import Actor
from rft.algorithm import (
    ADVANTAGES,
    AGGREGATIONS,
    CONTROLS,
    GRADIENT_MASKS,
    LOSSES,
    SELECTIONS,
    SHAPINGS,
)
from rft.algorithm.objective import Term
from rft.data.rows.judge_data import Question
from rft.data.rows.mixture import Mixture
from rft.data.rows.schemas import SCHEMAS
from rft.data.rows.scored import ScoredAnswers, ScoredPairs
from rft.data.rows.split import ExcludeRows
from rft.data.tool_calls import TOOL_CALLS
from rft.registry import Registry, options_class
from rft.reward import REWARDS
from rft.reward.compose import WeightedSum, WeightedTerm
from rft.reward.thought import ReadingOptions
from rft.rollout.environment.options import EnvironmentOptions
from rft.rollout.server.vllm import VLLMServers
from rft.setup.schema import root_with_roles
from rft.train.schedules import SCHEDULES


@dataclass
class Policy:
    """What the setup reads of the node beside the options of its class.

    Attributes:
        processor: the function that makes the processor of a model of images or sounds; null for a model of text.
    """

    processor: Any


@dataclass
class Reference:
    """What the setup reads of the node beside the options of its class."""

    precompute: bool


@dataclass
class AnyTerm:
    """What every term may have, beside the options of its function or class.

    Attributes:
        function: in place of a name.
        call: keys of `reward.call` that are others for this term.
    """

    function: str
    call: dict[str, Any]


NAME = "<name>"  # in a key: a name of the user's choice
NOT_OPTIONS = ("context", "world", "tokenizer", "key", "caller", "plugin")  # what the run supplies
# What takes the nodes whose type is open in the config, beside the class or function that they name.
OWNERS: dict[str, tuple[Callable, ...]] = {
    "": (root_with_roles(),),
    "actor": (Actor, Policy),
    f"algorithm.terms.{NAME}": (Term,),
    "data.train.question": (Question,),
    "environment": (EnvironmentOptions,),
    "reference": (Reference,),
    "reward": (WeightedSum,),
    f"reward.terms.{NAME}": (AnyTerm, WeightedTerm, ReadingOptions),
    "rollout.engine": (VLLMServers,),
}
# Of the nodes that name a function.
REGISTRIES: dict[str, Registry] = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.critic_loss": LOSSES,
    "algorithm.gradient_mask": GRADIENT_MASKS,
    "algorithm.loss": LOSSES,
    "algorithm.pick": SELECTIONS,
    "algorithm.prm_loss": LOSSES,
    "algorithm.reward_kl.coef": CONTROLS,
    f"algorithm.schedules.{NAME}": SCHEDULES,
    f"algorithm.shaping.{NAME}": SHAPINGS,
    f"algorithm.terms.{NAME}": LOSSES,
    f"algorithm.terms.{NAME}.coef": CONTROLS,
    "data.train.schema": SCHEMAS,
    "environment.tool_format": TOOL_CALLS,
    f"reward.terms.{NAME}": REWARDS,
}
IN_NO_FILE = (Mixture, ScoredPairs, ScoredAnswers, ExcludeRows)  # classes of data.train that no option file names


@dataclass
class Node:
    """A class, dataclass or function, and the yaml nodes whose options it takes.

    Attributes:
        owner: the class, dataclass or function.
        keys: of the nodes.
        name: by which a yaml chooses it; empty for a dataclass, which the key implies.
        named_by: the option files that choose it.
        values, comments: by option, and by the file that sets it.
    """

    owner: Callable
    keys: list[str]
    name: str = ""
    named_by: list[OptionFile] = field(default_factory=list)
    values: dict[str, dict[OptionFile, Any]] = field(default_factory=dict)
    comments: dict[str, dict[OptionFile, str]] = field(default_factory=dict)


def nodes() -> list[Node]:
    """What takes the nodes of all option files, and the dataclasses that no option file fills."""
    nodes: dict[Callable, Node] = {owner: Node(owner, ["data.train"]) for owner in IN_NO_FILE}
    for file in option_files():
        read = set()  # of several nodes in one file, such as those of data.train and data.eval, the first counts
        for owner, name, key, path in takers(file):
            node = nodes.setdefault(owner, Node(owner, [], name))
            node.keys += [key] if key not in node.keys else []
            if owner in read:
                continue
            read.add(owner)
            node.named_by += [file] if name else []
            own = reduce(lambda inside, word: inside.get(word, {}), path, file.own)
            for option, annotation in parameters(owner, key).items():
                if option in own and _shown(own[option], annotation):
                    node.values.setdefault(option, {})[file] = own[option]
                if (comment := file.comments.get((*path, option))) is not None:
                    node.comments.setdefault(option, {})[file] = comment
    waiting = list(nodes.values())
    for node in waiting:  # it grows
        for option, annotation in parameters(node.owner).items():
            for kind, below in ((annotation, option), (_element(annotation), f"{option}.{NAME}")):
                if (inner := dataclass_of(kind)) is not None and inner not in nodes:
                    nodes[inner] = Node(inner, [f"{node.keys[0]}.{below}".removeprefix(".")])
                    waiting.append(nodes[inner])
    return list(nodes.values())


def _shown(value: Any, annotation: Any) -> bool:
    """Whether a value is one of an option, and no node with options of its own."""
    if not isinstance(value, Mapping):
        return True
    return (
        annotation is not Any
        and dataclass_of(annotation) is None
        and not any(isinstance(inner, Mapping) or name == "_target_" for name, inner in value.items())
    )


def takers(file: OptionFile) -> Iterator[tuple[Callable, str, str, tuple[str, ...]]]:
    """(what takes it, the name that chooses it, key, names of the keys in the file) of the nodes of a file."""
    return _owned(file.whole, file.key, _annotation(file.key), ())


def _owned(
    body: Mapping[str, Any], key: str, annotation: Any, path: tuple[str, ...]
) -> Iterator[tuple[Callable, str, str, tuple[str, ...]]]:
    """The same of a node and of all nodes below it."""
    owners = _owners(key, annotation)
    yield from ((owner, "", key, path) for owner in owners)
    target, name = str(body.get("_target_", "")), body.get("name")
    if target.startswith("rft."):
        module, _, attribute = target.rpartition(".")
        owners = [*owners, vars(importlib.import_module(module))[attribute]]
        yield owners[-1], attribute, key, path
    elif key in REGISTRIES and isinstance(name, str):
        owners = [*owners, REGISTRIES[key].function(name)]
        yield owners[-1], name, key, path
    for option, value in body.items():
        if isinstance(value, Mapping):
            below, inner = _below(owners, annotation, option)
            yield from _owned(value, f"{key}.{below}".removeprefix("."), inner, (*path, option))


def _annotation(key: str) -> Any:
    """The type of a node of the config."""
    above, _, option = key.rpartition(".")
    return _below(_owners(above, _annotation(above)), _annotation(above), option)[1] if key else Any


def _owners(key: str, annotation: Any) -> list[Callable]:
    """What takes a node by its key or its type."""
    found = dataclass_of(annotation)
    return [*OWNERS.get(key, ()), *([] if found is None else [found])]


def _below(owners: list[Callable], annotation: Any, option: str) -> tuple[str, Any]:
    """The name and the type of an option of a node."""
    for owner in owners:
        if option in parameters(owner):
            return option, parameters(owner)[option]
    element = None if owners else _element(annotation)
    return (option, Any) if element is None else (NAME, element)


def _element(annotation: Any) -> Any:
    """The type of the values of a mapping; None for another type."""
    kinds = [kind for kind in (annotation, *typing.get_args(annotation)) if typing.get_origin(kind) is dict]
    return typing.get_args(kinds[0])[1] if kinds else None


@cache
def parameters(owner: Callable, key: str = "") -> dict[str, Any]:
    """The options of a class or function with their annotations; `name` is none where it names a function."""
    taker = options_class(owner) or owner
    signature = [p for p in inspect.signature(taker).parameters.values() if p.name not in NOT_OPTIONS]
    if not isinstance(taker, type):
        supplied = {name for registry in REGISTRIES.values() for name in registry.supplied}
        signature = [p for p in signature if p.kind is p.KEYWORD_ONLY and p.name not in supplied]
    annotated = attrgetter("__init__")(taker) if isinstance(taker, type) else taker
    hints = typing.get_type_hints(annotated, include_extras=True)
    return {p.name: hints.get(p.name, Any) for p in signature if not (p.name == "name" and key in REGISTRIES)}


def dataclass_of(annotation: Any) -> type | None:
    """The dataclass that an option becomes, where it is not null; None for another type."""
    if typing.get_origin(annotation) in (dict, list, tuple):
        return None
    if typing.get_origin(annotation) is Annotated:
        return dataclass_of(typing.get_args(annotation)[0])
    found = (kind for kind in (annotation, *typing.get_args(annotation)) if dataclasses.is_dataclass(kind))
    return next((kind for kind in found if isinstance(kind, type)), None)
