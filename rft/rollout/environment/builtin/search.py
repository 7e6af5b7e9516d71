"""A search engine over a file of documents as a tool. It ranks by BM25."""

import heapq
import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from rft.data.rows.text_files import json_lines
from rft.ranges import Fraction, NonNegativeFloat

WORD = re.compile(r"\w+")
MOST = 100  # documents of a result


def words(text: str) -> list[str]:
    """The words of a text, in small letters and without punctuation."""
    return WORD.findall(text.casefold())


@dataclass(frozen=True)
class Index:
    """Documents, and where their words are.

    The score of a document is the sum of `idf * n / (n + norm)` over the different words of a query, where a word is n
    times in the document: BM25 (Robertson and Zaragoza 2009). A word in d of D documents has
    `idf = log(1 + (D - d + 0.5) / (d + 0.5))`: with the 1, as Lucene has it, it is above 0 for every word.

    Attributes:
        shown: the documents as the model reads them.
        norms: `k1 * (1 - b + b * length / mean length)` of each document.
        postings: by word the numbers of the documents that have it, and how often each has it.
    """

    shown: list[str]
    norms: array
    postings: dict[str, tuple[array, array]]

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Number and score of the best documents that have a word of the query; of equal ones the first."""
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(words(query)):
            numbers, times = self.postings.get(word, ((), ()))
            idf = math.log(1 + (len(self.shown) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            for number, n in zip(numbers, times, strict=True):
                scores[number] += idf * n / (n + self.norms[number])
        return heapq.nsmallest(count, scores.items(), key=lambda found: (-found[1], found[0]))


@cache
def build_index(corpus: str, text: str, title: str | None, k1: float, b: float) -> Index:
    """The index of a file, which all objects of this process share. The options are those of `Search`."""
    shown, lengths = list[str](), array("I")
    postings: dict[str, tuple[array, array]] = {}
    for where, document in json_lines(corpus, "corpus"):
        parts = [_field(document, name, option, where) for option, name in (("title", title), ("text", text)) if name]
        found = words(" ".join(parts))
        for word, n in Counter(found).items():
            numbers, times = postings.setdefault(word, (array("I"), array("I")))
            numbers.append(len(shown))
            times.append(n)
        shown.append("\n".join(parts))
        lengths.append(len(found))
    if not sum(lengths):
        raise ValueError(f"corpus={corpus}: the file has no words; give a file with one document a line")
    mean = sum(lengths) / len(lengths)
    return Index(shown, array("d", (k1 * (1 - b + b * length / mean) for length in lengths)), postings)


def _field(document: dict[str, Any], name: str, option: str, where: str) -> str:
    if isinstance(found := document.get(name), str):
        return found
    wrong = f"the field {name!r} is no text" if name in document else f"no field {name!r}"
    raise ValueError(f"{where}: {wrong} (known: {', '.join(document) or 'none'}); set {option} to the name of a text")


class Search:
    """An environment with a search engine. Its episodes have no state, and share the index.

    Args:
        corpus: a jsonl file with one document a line.
        text: the field of a document with its text.
        title: the field with its title, which is found and shown, too; null: documents have none.
        k1: how much it counts that a document has a word several times; 0: not at all.
        b: how much a long document is held against it; 0: not at all.

    Raises:
        ValueError: there is no such file or field; names the option, the file and the line.
    """

    def __init__(self, *, corpus: str, text: str, title: str | None, k1: NonNegativeFloat, b: Fraction) -> None:
        self._index = build_index(corpus, text, title, k1, b)

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Builds the index, which the processes of episodes then share."""
        cls(**options)

    def reset(self, **row: Any) -> None:
        """Adds nothing to the prompt."""

    def search(self, query: str, count: int = 3) -> str:
        """Searches documents by the words of a query.

        Args:
            query: the words.
            count: how many documents are returned, the best first.
        """
        if not isinstance(query, str) or not isinstance(count, int) or not 1 <= count <= MOST:
            raise ValueError(f"query must be a text, and count a whole number from 1 to {MOST}")
        found = self._index.best(query, count)
        shown = [f"[{place}] {self._index.shown[number]}" for place, (number, _) in enumerate(found, start=1)]
        return "\n\n".join(shown) or "No document has a word of the query."
