"""The classes and modules that a config names."""

from typing import Any

from rft.actor.base import ColumnModel, ModelOptions
from rft.algorithm.roles import ROLES
from rft.data.base import Source, SourceFacts, SourceOptions
from rft.registry import Target
from rft.rollout.answerer import Episodes
from rft.strategy.base import Strategy, StrategyOptions

CONTEXT = ("context", "options")  # the constructor arguments that the run supplies to models, engines and sources


def class_of(node: Any, key: str, kind: type, options: type, noun: str) -> Target:
    """A class named by `_target_` that implements an abstract class.

    Args:
        kind: the abstract class.
        options: the base class of its options.
        noun: what messages call an instance of it.

    Raises:
        ValueError: names the key.
    """
    target = Target(node, key, CONTEXT)
    if not (isinstance(target.factory, type) and issubclass(target.factory, kind)):
        raise ValueError(
            f"{key}._target_: {target.factory.__name__} is no {noun}; name a class that implements "
            f"{kind.__module__}.{kind.__name__}"
        )
    if not isinstance(target.options, options):
        raise ValueError(
            f"{key}._target_: {target.factory.__name__} names no dataclass of its options; give it `Options = ...`, "
            f"derived from {options.__module__}.{options.__name__}"
        )
    return target


def source_of(node: Any, key: str) -> Target:
    """The class of a source of batches, with its options. Raises as `class_of`."""
    return class_of(node, key, Source, SourceOptions, "source of batches")


def facts_of(source: Target, environments: Episodes | None) -> SourceFacts:
    """The facts that a source states about itself, with the options of its yaml and the environments of the run."""
    facts: SourceFacts = source.options.facts()
    return facts if environments is None else facts.with_episodes(environments.columns_if_read)


def actor_of(node: Any, key: str) -> Target:
    """The class of a model, with its options.

    Raises:
        ValueError: names the key; also for a remote model in a role that trains or starts as the policy.
    """
    target = class_of(node, key, ColumnModel, ModelOptions, "model")
    remote = [role.key for role in ROLES if role.loss is None and not role.follows]
    if key not in remote and not target.factory.has_weights:
        name = target.factory.__name__
        raise ValueError(f"{key}._target_: {name} is a remote model, which only {' or '.join(remote)} may be")
    return target


def processor_of(actor: dict[str, Any]) -> Target | None:
    """The function that makes the processor of the policy, with its options; None for a model of text."""
    node = actor.pop("processor", None)
    return None if node is None else Target(node, "actor.processor", ("tokenizer",))


def strategy_of(node: Any) -> Target:
    """The class of the strategy, with its options. Raises as `class_of`."""
    return class_of(node, "strategy", Strategy, StrategyOptions, "strategy")
