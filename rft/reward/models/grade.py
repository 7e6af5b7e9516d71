"""The question about one response, and the number in a judge's text."""

import math
import re
from collections.abc import Mapping
from typing import Any

from rft.data.rows.judge_data import Question
from rft.registry import take
from rft.reward.rules.verdict import bad_group, last_group


class Grade:
    """The number in a judge's text: 1 or 0 for the two words of the question, in any case, or a number as it stands.

    Args:
        pattern: a regular expression with one group, which is the verdict; its last match counts.
        unparsed: the score of a text without a match, or with one that is neither a word nor a number.
        words, key: supplied; of the question, and the node's place in the yaml.

    Raises:
        ValueError: the pattern is not a regular expression with one group; names the key.
    """

    def __init__(self, pattern: str, unparsed: float, words: list[str], key: str) -> None:
        if (fault := bad_group(pattern)) is not None:
            raise ValueError(f"{key}.{fault}")
        self._pattern = pattern
        self._unparsed = unparsed
        self._scores = {word.strip().casefold(): 1.0 - number for number, word in enumerate(words)}

    @classmethod
    def of(cls, node: Mapping[str, Any], words: list[str], key: str) -> "Grade":
        """The grade of a yaml node."""
        return cls(**take(node, cls, key, "a grade", ("words", "key")), words=words, key=key)

    def __call__(self, text: str) -> float:
        """The score of a judge's text."""
        verdict = last_group(text, self._pattern) or ""
        if verdict in self._scores:
            return self._scores[verdict]
        number = float(verdict) if re.fullmatch(r"-?\d+(\.\d+)?", verdict) else math.inf
        return number if math.isfinite(number) else self._unparsed


def about_one(node: Mapping[str, Any], key: str) -> Question:
    """The question of a term.

    Args:
        node: of the yaml.
        key: of the term.

    Raises:
        ValueError: it compares two responses.
    """
    question = Question.of(node, f"{key}.question")
    if question.compares:
        raise ValueError(
            f"{key}.question.text compares {{a}} and {{b}}, and a reward term has one {{response}}; ask about that"
        )
    return question
