"""Builds a reward term from its yaml node: a registered function, a function of the user's own, or a class."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft.batch.row_fields import own_copy
from rft.imports import import_part
from rft.registry import Plugin, Target
from rft.reward import REWARDS
from rft.reward.term import RowTerm, Term

# A part, which a term with `function` imports: its module and its function.
FUNCTION = ("rft.reward.function", "function_term")


class Rule(RowTerm):
    """A registered function of one response and its row."""

    def __init__(self, plugin: Plugin) -> None:
        self.reads = plugin.facts.reads
        self.extracts = plugin.facts.extract is not None
        assert plugin.facts.others in ("zero", "less", "any"), f"{plugin.title} states others={plugin.facts.others!r}"
        self.others = plugin.facts.others
        assert plugin.facts.thoughts in ("keep", "skip", "show"), f"{plugin.title}: thoughts={plugin.facts.thoughts!r}"
        self.thoughts, self.opening = plugin.facts.thoughts, plugin.facts.opening
        self.tool_calls = plugin.facts.tool_calls
        self._plugin = plugin

    def check_row(self, row: Mapping[str, Any]) -> None:
        if self._plugin.facts.gold is not None:
            self._plugin.call("gold", row)

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
        return () if self._plugin.facts.writes is None else self._plugin.call("writes", own_copy(row))

    def value(self, response: str, row: Mapping[str, Any]) -> Any:
        return self._plugin(response, row)

    def extract(self, response: str) -> str | None:
        return self._plugin.call("extract", response) if self.extracts else None


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
        made: Term = import_part(*FUNCTION, f"{key}.function={node['function']}")(node, key)
        return made
    return Rule(REWARDS.build(node, key))
