"""What a term reads of a response with thoughts: the answer behind them, or also the mark that the prompt opens."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rft.batch.entries import PROMPT_OPENS
from rft.batch.thoughts import MARKS, behind_thought
from rft.registry import convert
from rft.reward.registry import REWARDS
from rft.reward.term import Term

OPTIONS = ("reasoning", "prompt_opens")  # keys of the reward; a term overrides each


@dataclass(frozen=True)
class ThoughtOptions:
    """How thoughts are found; the yaml documents each option.

    Attributes:
        reasoning: the marks around a thought, or none: then the whole response is read as the answer.
        prompt_opens: every prompt ends inside of a thought, or none does; None: the run finds it out for each prompt.
    """

    reasoning: list[str]
    prompt_opens: bool | None


def split_node(
    node: Mapping[str, Any], defaults: ThoughtOptions, key: str
) -> tuple[dict[str, Any], ThoughtOptions, tuple[str, ...]]:
    """The options of a term in the yaml, and beside them how its thoughts are found.

    A function with a parameter of the name of such an option gets it itself.

    Args:
        node: of the term.
        defaults: of the options that the node leaves out, or has as null.
        key: of the node.

    Returns:
        The options of the term itself, those of its thoughts, and the names of those that the node sets.

    Raises:
        ValueError: an option is of another type; names the key.
    """
    takes: Mapping[str, Any] = node if "function" in node else {}
    if node.get("name") in REWARDS.names():
        takes = inspect.signature(REWARDS.function(node["name"])).parameters
    given = {name: node[name] for name in OPTIONS if name in node and name not in takes}
    kinds = {"reasoning": list[str], "prompt_opens": bool}
    own = {name: convert(value, kinds[name], f"{key}.{name}") for name, value in given.items() if value is not None}
    options = {name: value for name, value in node.items() if name not in given}
    return options, ThoughtOptions(**asdict(defaults) | own), tuple(own)


class Reading:
    """The text that a term gets of a response.

    Args:
        term: states in `Term.thoughts` which part it reads.
        options: of the term.
        key: of the term in the yaml.
        own: the names of the options that the term itself sets.

    Raises:
        ValueError: `reasoning` is malformed, or options have no effect; names the key.
    """

    def __init__(self, term: Term, options: ThoughtOptions, key: str, own: tuple[str, ...]) -> None:
        keys = {name: f"{key}.{name}" if name in own else f"reward.{name}" for name in OPTIONS}
        marks = options.reasoning
        if len(marks) not in (0, 2) or not all(marks):
            raise ValueError(
                f"{keys['reasoning']}={marks!r}: write the tags before and after it, ['<think>', '</think>'], or []"
            )
        if term.thoughts == "keep" and own:
            raise ValueError(f"{keys[own[0]]}: this term gets whole responses, thoughts included; remove it")
        mark = term.opening or (marks[0] if marks else None)
        if options.prompt_opens and term.thoughts != "keep" and mark is None:
            raise ValueError(
                f"{keys['prompt_opens']}=true: {keys['reasoning']}=[] names no mark that a prompt could open; set both "
                "marks there, or remove it"
            )
        self.kind = term.thoughts
        self._options = options
        self._mark = mark
        self._closing = MARKS | (dict([marks]) if marks else {})

    def opened(self, row: Mapping[str, Any]) -> str | None:
        """The mark of the thought in which the prompt of a row ends; None where it ends in none.

        Args:
            row: of the data set, with the entry `PROMPT_OPENS` if the run rendered the prompt and it opens a thought.
        """
        if self._options.prompt_opens is None:
            mark = row.get(PROMPT_OPENS)
            return mark if isinstance(mark, str) and mark in self._closing else None
        return self._mark if self._options.prompt_opens else None

    def text(self, response: str, row: Mapping[str, Any]) -> str | None:
        """What the term gets; None where it reads answers and the response has none, as a thought does not end."""
        marks = self._options.reasoning
        if self.kind == "keep" or (self.kind == "skip" and not marks):
            return response
        opened = self.opened(row)
        whole: str | None = f"{opened or ''}{response}"
        if self.kind == "show":
            return whole
        for opening in dict.fromkeys([*([opened] if opened else []), marks[0]]):
            whole = None if whole is None else behind_thought(whole, opening, self._closing[opening])
        return whole

    def answered(self, answer: str, row: Mapping[str, Any]) -> str:
        """A response whose answer is this text: to a prompt that opens a thought, one that ends the thought first."""
        opened = self.opened(row)
        if self.kind != "skip" or not self._options.reasoning or opened is None:
            return answer
        return f"So I think.\n{self._closing[opened]}\n\n{answer}"
