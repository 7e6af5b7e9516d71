"""Questions for a judge: a model that answers with one word whether a response is good, or which of two is better."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rft.data.encode.parts import conversation
from rft.data.given.pairs import TRUTHS
from rft.data.rows.base import is_weighted
from rft.data.rows.lazy import LazyRows, Row, Rows, load
from rft.data.text import read_text
from rft.errors import prefixed
from rft.ranges import Seed
from rft.registry import Target, take

NAMES = ("prompt", "response", "answer", "a", "b")
PLACEHOLDER = re.compile(rf"\{{({'|'.join(NAMES)})\}}")
OWN_FIELDS = ("prompt", "response", "answer")  # fields that `JudgeRows` writes


class Question:
    """A text with placeholders for the responses to judge.

    Args:
        text: a text with {response}, or with {a} and {b}, and optionally with {prompt} and {answer} of the row; or the
            path of a file with such a text.
        words: the two verdicts: good and not good, or a and b.
        key: supplied by the run: the yaml key.

    Attributes:
        words: the two verdicts.
        compares: whether the question is about two responses.
        reads: the fields of a row that the question needs, besides responses.

    Raises:
        ValueError: a placeholder is missing, there is no such file, or there are not two words.
    """

    def __init__(self, text: str, words: list[str], key: str) -> None:
        if not PLACEHOLDER.search(text):
            text = read_text(text, f"{key}.text")
        names = set(PLACEHOLDER.findall(text))
        if names & {"response", "a", "b"} not in ({"response"}, {"a", "b"}):
            raise ValueError(f"{key}.text={text!r:.80}: it needs {{response}}, or {{a}} and {{b}}")
        if len({word.strip() for word in words} - {""}) != 2 or len(words) != 2:
            raise ValueError(f"{key}.words={words}: name two verdicts, such as [Yes, No]")
        self.words = words
        self.compares = "a" in names
        self.reads = tuple(name for name in ("prompt", "answer") if name in names)
        self._text = text

    @classmethod
    def of(cls, node: Mapping[str, Any], key: str) -> "Question":
        """The question of a yaml node."""
        return cls(**take(node, cls, key, "a question", ("key",)), key=key)

    def ask(self, row: Mapping[str, Any], **responses: Any) -> str | list[dict[str, Any]]:
        """The question with all placeholders replaced: a text, or one message of a user if a value has media.

        Args:
            row: has the fields of `reads`.
            responses: `response`, or `a` and `b`: texts, or chat messages.

        Raises:
            ValueError: one of these has no text.
        """
        values = {name: row[name] for name in self.reads} | responses
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(PLACEHOLDER.split(self._text)):  # between two texts is the name of a value
            parts += to_parts(values[piece], piece) if number % 2 else [_text(piece)]
        content = joined(parts)
        return content if isinstance(content, str) else [{"role": "user", "content": content}]


class JudgeRows:
    """Rows for training a judge (generative reward models, arXiv 2408.15240): a question and the right verdict.

    In each row `prompt` is the question, `response` and `answer` are the verdict. If the question compares two
    responses, a pair is one row: the better response is a or b at random in each pair with an even index, and on the
    other side in the next pair. If the question is about one response, a pair is two rows.

    Args:
        rows: a class that loads rows, as in `data.train`.
        of: pairs: `chosen` and `rejected` of a row; labels: its `completion`, which is good where its `label` is true.
        question: a text and two words, see `Question`.
        seed: seed of the random sides.
        key: supplied by the run: the yaml key of the node.

    Raises:
        ValueError: the rows are a mixture, or the question does not fit `of`; names the key.
    """

    def __init__(
        self, rows: dict[str, Any], of: Literal["pairs", "labels"], question: dict[str, Any], seed: Seed, key: str
    ) -> None:
        self._key = key
        self._pairs = of == "pairs"
        self._question = Question.of(question, f"{key}.question")
        self._seed = seed
        self._rows = Target(rows, f"{key}.rows", ("key",))
        if is_weighted(self._rows):
            raise ValueError(
                f"{key}.rows: the weights of a mixture would be lost; put a JudgeRows into every part of a mixture"
            )
        if self._question.compares and not self._pairs:
            raise ValueError(f"{key}.of=labels: a question about {{a}} and {{b}} needs pairs; ask about {{response}}")

    def load(self, required: Sequence[str]) -> Rows:
        """All questions; each is checked once."""
        judged = ("chosen", "rejected") if self._pairs else ("completion", "label")
        fields = {*judged, *self._question.reads, *(field for field in required if field not in OWN_FIELDS)}
        rows = load(self._rows, fields)
        each = 2 if self._pairs and not self._question.compares else 1

        def read(number: int) -> Row:
            with prefixed(f"{self._key} row {number // each + 1}: "):
                return self._row(rows[number // each], number)

        for number in range(each * len(rows)):
            read(number)
        return LazyRows(each * len(rows), read)

    def _row(self, row: Row, number: int) -> Row:
        if self._question.compares:
            first = self._draw(number)
            a, b = ("chosen", "rejected") if first else ("rejected", "chosen")
            question = self._question.ask(row, a=row[a], b=row[b])
        elif self._pairs:
            first = number % 2 == 0
            question = self._question.ask(row, response=row["chosen" if first else "rejected"])
        else:
            if (label := str(row["label"]).lower()) not in TRUTHS:
                raise ValueError(f"label is {row['label']!r}, not true or false")
            first = TRUTHS[label]
            question = self._question.ask(row, response=row["completion"])
        verdict = self._question.words[0 if first else 1]
        kept = {field: value for field, value in row.items() if field != "tools"}  # a judge uses no tools
        return kept | dict(zip(OWN_FIELDS, (question, verdict, verdict), strict=True))

    def _draw(self, number: int) -> bool:
        return (random.Random(f"{self._seed} {number // 2}").random() < 0.5) == (number % 2 == 0)


def to_parts(value: Any, what: str) -> list[dict[str, Any]]:
    """The content parts of a text, of a single chat message, or of several messages with their roles.

    Raises:
        ValueError: a message has no content.
    """
    if not isinstance(value, list):
        return [_text(str(value))]
    messages, parts = conversation(value, what), []
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str | list):
            raise ValueError(f"{what} has a message without text, so a judge cannot read it: {message!r:.80}")
        if len(messages) > 1:
            parts.append(_text("\n\n" * bool(number) + f"{message['role']}: "))
        parts += content if isinstance(content, list) else [_text(content)]
    return parts


def joined(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Content parts with neighbouring texts joined, or one text if all of them are texts."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and found and found[-1]["type"] == "text":
            part = _text(found.pop()["text"] + part["text"])
        found.append(dict(part))
    found = [part for part in found if part != _text("")]
    return "".join(part["text"] for part in found) if all(part["type"] == "text" for part in found) else found


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
