"""Builds a reward term from its yaml node: a registered function, a function of the user's own, or a class."""

from collections.abc import Mapping
from typing import Any

from rft.registry import Target
from rft.reward import REWARDS
from rft.reward.function import function_term
from rft.reward.rule import Rule
from rft.reward.term import Term


def build_term(node: Mapping[str, Any], key: str) -> Term:
    """The term of a yaml node.

    Args:
        node: {name, options} of a registered function, {function, options} of another one, {_target_, options} of a
            class.
        key: of the node, for messages.

    Raises:
        ValueError: the node is malformed; names the key.
    """
    if "_target_" in node:
        term: Term = Target(node, key, ("key",)).build(key=key)
        return term
    if "function" in node:
        return function_term(node, key)
    return Rule(REWARDS.build(node, key))
