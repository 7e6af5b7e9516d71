"""How much of a gold answer a response has, word by word: the measures of SQuAD, arXiv 1606.05250, section 6.1."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from rft.reward.rules.tags import bad_tag, last_block
from rft.reward.term import REWARDS

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# Chinese and Japanese have no blanks between words: every character counts as a word.
CHARACTERS = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and the articles a, an, the."""
    kept = "".join(
        letter
        for letter in text.lower()
        if letter not in string.punctuation and not unicodedata.category(letter).startswith("P")
    )
    return CHARACTERS.sub(r" \g<0> ", ARTICLES.sub(" ", kept)).split()


def _golds(row: Mapping[str, Any]) -> list[list[str]]:
    answer = row["answer"]
    texts = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(text, str | int | float) for text in texts):
        raise ValueError(
            f"the field 'answer' is neither a text nor a list of texts: {answer!r:.80}; name another field"
        )
    golds = [words for text in texts if (words := words_of(str(text)))]
    if not golds:
        raise ValueError(
            f"the field 'answer' has no word besides articles and punctuation: {answer!r:.80}; write one, choose "
            "reward/terms=[exact_match], or remove the row"
        )
    return golds


def _words(response: str, tag: str | None) -> list[str]:
    return words_of(last_block(response, tag) or "")


def _text(response: str, tag: str | None) -> str | None:
    return " ".join(_words(response, tag)) or None


def _written(row: Mapping[str, Any], metric: str, tag: str | None) -> list[str]:
    answer = row["answer"]
    texts = [str(text) for text in (answer if isinstance(answer, list) else [answer]) if words_of(str(text))]
    texts += [f" {texts[0]}. "]
    if metric == "contains":
        texts += [f"I think of {texts[0]}, of course"]
    return texts if tag is None else [f"<think>Paris, perhaps.</think> <{tag}>{text}</{tag}>" for text in texts]


@REWARDS.register(
    "overlap",
    reads=("answer",),
    thoughts="skip",
    extract=_text,
    gold=_golds,
    writes=_written,
    others=lambda metric: {"f1": "less", "exact": "zero", "contains": "any"}[metric],
    fault=lambda tag: bad_tag("tag", tag),
)
def overlap(
    response: str, row: Mapping[str, Any], *, metric: Literal["f1", "exact", "contains"], tag: str | None
) -> float:
    """How well the words of the response agree with those of the row's `answer`, from 0 to 1.

    Both are compared in lower case, without punctuation and the articles a, an, the. If `answer` is a list, the text
    with the best value counts; texts without a word are left out. SQuAD's measures; a Chinese or Japanese character is
    a word, and punctuation is that of Unicode. Numbers lose their signs and points: 3.5 is 35, as in SQuAD.

    Args:
        metric: "f1": the F1 of the words; "exact": 1 where all words are equal in order, else 0; "contains": 1 where
            the words of the answer stand one behind the other somewhere in the response, else 0.
        tag: compares the text in the last block of this tag, and a response without one has 0; null: the response.

    Raises:
        ValueError: the row's `answer` is neither a text nor a list of texts, or has no word.
    """
    words, golds = _words(response, tag), _golds(row)
    if metric == "f1":  # 2 precision recall / (precision + recall) of the words; one counts as often as both have it
        return max(2 * (Counter(words) & Counter(gold)).total() / (len(words) + len(gold)) for gold in golds)
    if metric == "exact":
        return float(words in golds)
    return float(any(f" {' '.join(gold)} " in f" {' '.join(words)} " for gold in golds))
