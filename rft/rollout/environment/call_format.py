"""How answers call tools in a run: the format, what their texts keep for it, and what is odd about calls."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rft.data.encode.encoder import Encoder
from rft.data.tool_calls import Schema, ToolCall, calls_of
from rft.redaction import redact
from rft.registry import Plugin
from rft.rollout.answers import Answer
from rft.rollout.kept_marks import KeptMarks

ANSWERS = 100  # without a call, after which a run says so
CALLS = 20  # of a tool that all failed, after which a run says so
SHOWN = 200  # characters of an answer or an error in a message


class Read(NamedTuple):
    """An answer that was read.

    Attributes:
        text: without special tokens but for marks of the format. Where those are around a text without calls, as in the
            channels of gpt-oss, the content alone.
        content: beside the calls.
        calls: each, or why it cannot be read.
    """

    text: str
    content: str
    calls: list[ToolCall | str]


class CallReader(ABC):
    """Reads the calls of answers.

    Attributes:
        described: False if the prompt does not describe the tools.
    """

    described: bool = True

    @abstractmethod
    def read(self, prompt: Sequence[int], answer: Answer, tools: Mapping[str, Schema], stop: Sequence[str]) -> Read:
        """The text of an answer, its content and its calls.

        Args:
            prompt: its token ids.
            tools: that it may call, by their names.
            stop: strings that end a text.
        """


class CallFormat(CallReader):
    """Reads calls in a format of `TOOL_CALLS`.

    Where the marks of a format are special tokens of the tokenizer, an answer without such a token calls nothing: it
    may quote the text of a mark.

    Args:
        format: of `TOOL_CALLS`.
        encoder: of the run.
    """

    def __init__(self, format: Plugin, encoder: Encoder) -> None:
        self.described = format.facts.described
        self._format = format
        self._encoder = encoder
        self._marks = KeptMarks(encoder, [format])
        openings, special = format.facts.openings, {} if encoder.chat is None else encoder.chat.special
        self._openings = {token for token, text in special.items() if text in openings}
        self._by_token = bool(openings) and {*openings} <= {special[token] for token in self._openings}

    def read(self, prompt: Sequence[int], answer: Answer, tools: Mapping[str, Schema], stop: Sequence[str]) -> Read:
        tokens = answer.tokens
        marked = self._marks.text(tokens, stop)
        text = answer.finish.text if marked is None else marked
        if self._by_token and self._openings.isdisjoint(tokens):
            return Read(text, text, [])
        content, calls = calls_of(text, tools, self._format, self._encoder.thoughts.opened(prompt))
        return Read(text if marked is None or calls else content, content, calls)


class CallNotices:
    """Says once what is odd about calls: the first answers have none in spite of tools, or a tool always fails."""

    def __init__(self) -> None:
        self._answers: int | None = 0  # without a call; None: there was one, or it is said
        self._failed: dict[str, int | None] = {}  # calls of each tool; None: one succeeded, or it is said

    def answered(self, read: Read) -> None:
        """Counts an answer to a prompt that offers tools."""
        if self._answers is None:
            return
        self._answers = None if read.calls else self._answers + 1
        if self._answers == ANSWERS:
            self._answers = None
            logging.getLogger(__name__).warning(
                "The first %d answers to prompts with tools call none. The last one: %r. If it is a call, set "
                "environment.tool_format to its format",
                ANSWERS, read.text[:SHOWN],
            )  # fmt: skip

    def used(self, tool: str, fault: str | None) -> None:
        """Counts the call of a tool.

        Args:
            fault: why it failed; None if it did not.
        """
        count = self._failed.setdefault(tool, 0)
        if count is None:
            return
        self._failed[tool] = None if fault is None else count + 1
        if fault is not None and count + 1 == CALLS:
            self._failed[tool] = None
            logging.getLogger(__name__).warning(
                "The first %d calls of the tool %r failed. The last error: %r", CALLS, tool, redact(fault)[:SHOWN]
            )
