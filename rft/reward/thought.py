"""What a term reads of a response: the answer behind its thoughts, or also what the prompt begins of it."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rft.batch.row_fields import EPISODE_FIELD, PROMPT_OPENS
from rft.batch.thoughts import MARKS, behind_thought
from rft.data.encode.parts import text_of
from rft.imports import import_part
from rft.registry import Plugin, convert
from rft.reward.term import REWARDS, Term

# Keys of the reward, which a term overrides, with their types.
OPTIONS: dict[str, Any] = {"reasoning": list[str], "prompt_opens": bool, "include_prefill": bool}
OF_THOUGHTS = ("reasoning", "prompt_opens")


@dataclass(frozen=True)
class ReadingOptions:
    """How a term reads a response.

    Attributes:
        reasoning: the marks around a thought, or none: then the whole response is read as the answer.
        prompt_opens: every prompt ends inside of a thought, or none does; None: the run finds it out for each prompt.
        include_prefill: a last message of the assistant in the prompt is the beginning of the response.
    """

    reasoning: list[str]
    prompt_opens: bool | None
    include_prefill: bool


def split_node(
    node: Mapping[str, Any], defaults: ReadingOptions, key: str
) -> tuple[dict[str, Any], ReadingOptions, tuple[str, ...]]:
    """The options of a term in the yaml, and beside them how it reads a response.

    A function with a parameter of the name of such an option gets it itself.

    Args:
        node: of the term.
        defaults: of the options that the node leaves out, or has as null.
        key: of the node.

    Returns:
        The options of the term itself, those of its reading, and the names of those that the node sets.

    Raises:
        ValueError: an option is of another type; names the key.
    """
    takes: Mapping[str, Any] = node if "function" in node else {}
    if "name" in node and REWARDS.knows(node["name"], f"{key}.name={node['name']}"):
        takes = inspect.signature(REWARDS.function(node["name"])).parameters
    given = {name: node[name] for name in OPTIONS if name in node and name not in takes}
    own = {name: convert(value, OPTIONS[name], f"{key}.{name}") for name, value in given.items() if value is not None}
    options = {name: value for name, value in node.items() if name not in given}
    return options, ReadingOptions(**asdict(defaults) | own), tuple(own)


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

    def __init__(self, term: Term, options: ReadingOptions, key: str, own: tuple[str, ...]) -> None:
        keys = {name: f"{key}.{name}" if name in own else f"reward.{name}" for name in OPTIONS}
        marks = options.reasoning
        if len(marks) not in (0, 2) or not all(marks):
            raise ValueError(
                f"{keys['reasoning']}={marks!r}: write the tags before and after it, ['<think>', '</think>'], or []"
            )
        if term.thoughts == "keep" and (unread := [name for name in OF_THOUGHTS if name in own]):
            raise ValueError(f"{keys[unread[0]]}: this term gets whole responses, thoughts included; remove it")
        mark = term.opening or (marks[0] if marks else None)
        if options.prompt_opens and term.thoughts != "keep" and mark is None:
            raise ValueError(
                f"{keys['prompt_opens']}=true: {keys['reasoning']}=[] names no mark that a prompt could open; set both "
                "marks there, or remove it"
            )
        self.kind = term.thoughts
        self._calls = term.tool_calls
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

    def read(self, response: str, row: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
        """What the term gets of a response and its row.

        Returns:
            The text, None where the term reads answers and the response has none, as a thought does not end. The row,
            without the beginning of the response if the text has it.
        """
        if self._options.include_prefill:
            response, row = with_prefill(response, row)
        return self._text(response, row), row

    def _text(self, response: str, row: Mapping[str, Any]) -> str | None:
        marks = self._options.reasoning
        if self.kind == "keep" or (self.kind == "skip" and not marks):
            return response
        opened = self.opened(row)
        whole = f"{opened or ''}{response}"
        if self.kind == "show":
            return whole
        thoughts = {opening: self._closing[opening] for opening in (opened, marks[0]) if opening}
        return _answer(whole, thoughts) if self._calls is None else _calling(whole, thoughts, self._calls)

    def answered(self, answer: str, row: Mapping[str, Any]) -> str:
        """A response whose answer is this text: to a prompt that opens a thought, one that ends the thought first."""
        opened = self.opened(row)
        if self.kind != "skip" or not self._options.reasoning or opened is None:
            return answer
        return f"So I think.\n{self._closing[opened]}\n\n{answer}"


def _answer(text: str, thoughts: Mapping[str, str]) -> str | None:
    """The text behind all thoughts, whose closing marks are given by their opening marks; see `behind_thought`."""
    answer: str | None = text
    for opening, closing in thoughts.items():
        answer = None if answer is None else behind_thought(answer, opening, closing)
    return answer


def _calling(text: str, thoughts: Mapping[str, str], format: Plugin) -> str | None:
    """The text behind the thoughts before the first tool call, without the thoughts behind it.

    If a thought before the first call does not end, there is no call, and the text is that of any answer.
    """
    for opening, closing in thoughts.items():
        if closing in text.partition(opening)[0]:  # a prompt that is not known opened the thought
            text = f"{opening}{text}"
    without_thoughts = import_part("rft.data.tool_calls", "without_thoughts", format.title)
    parts = without_thoughts(text, format, thoughts, None)
    return _answer(text, thoughts) if parts is None else parts[1].lstrip()


def with_prefill(response: str, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A response with its beginning, a last message of the assistant in the prompt; and the row without this message.

    Both are returned as they are where the prompt has no such message behind another one, and in an episode, whose
    response is the last of several.
    """
    prompt = row.get("prompt")
    if EPISODE_FIELD in row or not isinstance(prompt, list) or len(prompt) < 2 or prompt[-1].get("role") != "assistant":
        return response, row
    prefill = text_of(prompt[-1].get("content") or "")
    # A thought that the message itself opens is one of the joined text, no longer one of the prompt.
    kept = {name: value for name, value in row.items() if name != PROMPT_OPENS or value not in prefill}
    return f"{prefill}{response}", kept | {"prompt": prompt[:-1]}
