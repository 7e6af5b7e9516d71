"""Special tokens in the texts of answers whose tool calls a reward or an environment reads."""

from collections.abc import Iterable, Sequence

from rft.batch.thoughts import MARKS
from rft.data.encode.encoder import Encoder
from rft.registry import Plugin


class KeptMarks:
    """Special tokens that the texts of answers keep: marks of tool calls and of thoughts. Engines leave out all.

    Args:
        encoder: of the run.
        formats: of tool calls, entries of `rft.data.tool_calls.TOOL_CALLS`.
    """

    def __init__(self, encoder: Encoder, formats: Iterable[Plugin]) -> None:
        marks = {mark for format in formats for mark in format.facts.marks}
        special = encoder.chat.special if marks and encoder.chat is not None else {}
        kept = {*marks, *MARKS, *MARKS.values()}
        self._encoder = encoder
        self._left_out = {token for token, text in special.items() if text not in kept}
        self._kept = special.keys() - self._left_out

    def text(self, tokens: Sequence[int], stop: Sequence[str]) -> str | None:
        """The text of an answer with its marks; None where it has no such token.

        Args:
            tokens: of the answer.
            stop: strings that end a text.
        """
        if self._kept.isdisjoint(tokens):
            return None
        text = self._encoder.decode([token for token in tokens if token not in self._left_out])
        return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]
