"""Measures what every term of a reward scores: right responses, those of other rows, an empty one, and each twice."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rft.batch.scores import Scores
from rft.data.rows.lazy import Rows
from rft.reward.call import Caller
from rft.reward.compose import WeightedSum

Kind = Literal["gold", "other", "empty", "thought", "plain"]
PLAIN = "Let me think. It may be 5, so the answer is 5."  # for terms that no right response is known for
CHUNK = 256  # texts that are scored at once


@dataclass(frozen=True)
class Probe:
    """A text that every term of its row scores.

    Attributes:
        row: index of the row.
        response: the text.
        kind: a right response of the row (`gold`), of a row with another answer (`other`), an empty text, a right
            answer inside of a thought that does not end (`thought`), or a text whose score is not known (`plain`).
        term: the term whose score is known; the others must only give it a score.
        expected: this score, `0`, `1` or `less than 1`.
    """

    row: int
    response: str
    kind: Kind
    term: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Fault:
    """A text whose score is not the expected one; `found` and `expected` are for people."""

    row: int
    response: str
    found: str
    expected: str


@dataclass(frozen=True)
class GraderCertificate:
    """What a term scores.

    Attributes:
        rows, texts: that it scores.
        known: of each kind, the number of texts whose score is known.
        held: of each kind, the number of them that have this score.
        repeated: the number of texts with the same score twice.
        faults: the texts with another score, without a score, or with two scores.
    """

    rows: int
    texts: int
    known: Counter[Kind]
    held: Counter[Kind]
    repeated: int
    faults: list[Fault]


def probes(reward: WeightedSum, rows: Rows) -> list[Probe]:
    """The texts of every row: an empty and a plain one, and for each of its terms those whose score is known."""
    callers: dict[str, Caller] = {}
    right: dict[str, dict[int, list[str]]] = {name: {} for name in reward.names}
    made = []
    for number, row in enumerate(rows):
        made += [Probe(number, text, "plain") for text in ("", PLAIN)]
        for name, caller in reward.callers_of(row).items():
            callers[name] = caller
            if texts := caller.term.gold_responses(row):
                right[name][number] = [caller.reading.answered(text, row) for text in texts]
                if right[name][number][0] != texts[0]:  # the prompt opens a thought, which this text does not end
                    made.append(Probe(number, texts[0], "thought", name, "0"))
    for name, by_row in right.items():
        for number, texts in by_row.items():
            made += [Probe(number, text, "gold", name, "1") for text in texts]
            if "" not in texts:
                made.append(Probe(number, "", "empty", name, "0"))
        if by_row and (others := callers[name].term.others) != "any":
            expected = "0" if others == "zero" else "less than 1"
            made += [Probe(*pair, "other", name, expected) for pair in _of_other_rows(callers[name], rows, by_row)]
    return made


def _of_other_rows(caller: Caller, rows: Rows, right: dict[int, list[str]]) -> Iterator[tuple[int, str]]:
    """For each row a right response of the next row with another answer; its writing changes from row to row."""
    numbers = list(right)
    answers = {
        number: {caller.extract(text, rows[number]) or text for text in texts} for number, texts in right.items()
    }
    for place, number in enumerate(numbers):
        following = numbers[place + 1 :] + numbers[:place]
        other = next((other for other in following if answers[other].isdisjoint(answers[number])), None)
        if other is not None:
            yield number, right[other][place % len(right[other])]


def certify(
    reward: WeightedSum, rows: Rows, texts: Sequence[Probe], show: Callable[[int], None]
) -> dict[str, GraderCertificate]:
    """Scores every text twice.

    Args:
        reward: a failure of its terms must not stop the run (`call.failed`).
        rows: of the data sets.
        texts: see `probes`.
        show: called with the number of texts that are scored, out of `2 * len(texts)`.

    Returns:
        The certificate of every term that scores a row, by name.
    """
    first = _score(reward, rows, texts, show)
    again = _score(reward, rows, texts, lambda done: show(len(texts) + done))
    certificates = {}
    for name in reward.names:
        numbers = [number for number, probe in enumerate(texts) if name in reward.callers_of(rows[probe.row])]
        if numbers:
            certificates[name] = _certificate(name, numbers, texts, first, again)
    return certificates


def _score(reward: WeightedSum, rows: Rows, texts: Sequence[Probe], show: Callable[[int], None]) -> list[Scores]:
    scores = []
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        scores.append(reward.score([probe.response for probe in chunk], [rows[probe.row] for probe in chunk]))
        show(start + len(chunk))
    return scores


def _certificate(
    name: str, own: Sequence[int], texts: Sequence[Probe], first: Sequence[Scores], again: Sequence[Scores]
) -> GraderCertificate:
    known, held, repeated, faults = Counter[Kind](), Counter[Kind](), 0, []
    for number in own:
        probe, value, other = texts[number], _value(first, number, name), _value(again, number, name)
        expected = probe.expected if probe.term == name else ""
        right, same = _fits(value, expected), repr(value) == repr(other)  # nan is not equal to itself
        if expected:
            known[probe.kind] += 1
            held[probe.kind] += right
        repeated += same
        if not right:
            found = first[number // CHUNK].unscored[number % CHUNK].get(name) if math.isnan(value) else f"{value:g}"
            faults.append(Fault(probe.row, probe.response, f"{found}", expected or "a score"))
        elif not same:
            faults.append(Fault(probe.row, probe.response, f"{value:g}, then {other:g}", "the same score twice"))
    rows = len({texts[number].row for number in own})
    return GraderCertificate(rows, len(own), known, held, repeated, faults)


def _value(scores: Sequence[Scores], number: int, name: str) -> float:
    """The raw value of a term on a text; NaN if it has none."""
    return float(scores[number // CHUNK].terms[name][number % CHUNK])


def _fits(value: float, expected: str) -> bool:
    return {"": not math.isnan(value), "1": value == 1, "0": value == 0, "less than 1": value < 1}[expected]
