"""The scores of responses as a reward returns them. A response that a term could not judge has no score: NaN."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import fields
from rft.batch.row_fields import EPISODE, UNSCORED, UNSCORED_FIELD
from rft.sanitize import LONGEST_NAME, OTHER

ACCURACY = "acc"  # the further number of a term that is the accuracy of a response


@dataclass(frozen=True)
class Scores:
    """The scores of N responses.

    Attributes:
        total: (N,) float32, the weighted sum; NaN for an unscored response.
        terms: by name, (N,) float32: the raw value of every term; NaN where it gave none.
        unscored: of each response, the reason by the name of every term that could not score it.
        whole_group: (N,) bool, True where the rows of the response's group are dropped with it.
        numbers: further numbers that a term returned, by `<term>/<name>`, (N,) float32; NaN where there is none.
    """

    total: Tensor
    terms: dict[str, Tensor]
    unscored: list[dict[str, str]]
    whole_group: Tensor
    numbers: dict[str, Tensor]

    @classmethod
    def plain(cls, total: Tensor, terms: dict[str, Tensor]) -> "Scores":
        """Scores without an unscored response."""
        return cls(total, terms, [{} for _ in total], torch.zeros(len(total), dtype=torch.bool), {})

    def drop_groups(self, sizes: Sequence[int]) -> "Scores":
        """Without the scores of groups of which one response drops all.

        Args:
            sizes: responses of each group; the responses of a group are consecutive.
        """
        dropped = [part.any().expand(len(part)) for part in self.whole_group.split(list(sizes))]
        return replace(self, total=self.total.masked_fill(torch.cat(dropped), torch.nan)) if dropped else self

    def drop_unknown(self, needed: Tensor) -> "Scores":
        """Without the scores of responses for which another score that they need, (N,), is NaN."""
        return replace(self, total=self.total.masked_fill(needed.isnan(), torch.nan))

    def drop_failed(self, failures: Sequence[str | None]) -> "Scores":
        """Without the scores of responses whose episode failed.

        Args:
            failures: the reason of each response; None where nothing failed.
        """
        failed = torch.tensor([failure is not None for failure in failures], dtype=torch.bool)
        unscored = [
            found if failure is None else {EPISODE: failure}
            for found, failure in zip(self.unscored, failures, strict=True)
        ]

        def known(columns: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: values.masked_fill(failed, torch.nan) for name, values in columns.items()}

        total = self.total.masked_fill(failed, torch.nan)
        return replace(self, total=total, terms=known(self.terms), unscored=unscored, numbers=known(self.numbers))

    def values(self, names: Sequence[str]) -> Tensor:
        """The value (N,) of one term of every response.

        Args:
            names: N names of terms.
        """
        found = [self.terms[name][number] for number, name in enumerate(names)]
        return torch.stack(found) if found else torch.zeros(0)

    def accuracies(self, names: Sequence[str]) -> Tensor:
        """The accuracy (N,) by one term of every response: the number `acc` that it returned, or else its value.

        A reward function of verl returns `{score, acc}`, where the score is what trains. NaN where the value is.

        Args:
            names: N names of terms.
        """
        values, given = self.values(names), torch.full((len(names),), torch.nan)
        for number, name in enumerate(names):
            if (column := self.numbers.get(f"{name}/{ACCURACY}")) is not None:
                given[number] = column[number]
        return torch.where(given.isnan() | values.isnan(), values, given)

    def add_to(self, row: dict[str, Any], number: int) -> None:
        """Adds the columns `scores` and `terms` of a response to its row, as `to_row` makes it."""
        row["scores"] = self.total[number]
        row["terms"] = {name: values[number] for name, values in self.terms.items()}
        if self.unscored[number]:
            row["fields"] = row["fields"] | {UNSCORED_FIELD: self.unscored[number]}


class Scoring(ABC):
    """The scoring of one round of responses. It may begin while other responses are still sampled.

    with reward.begin() as scoring:
        ...  # calls scoring.add for each response
        scores = scoring.finish(responses, rows)
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.cancel()

    def add(self, number: int, response: str, row: Mapping[str, Any]) -> None:
        """Announces a response of `finish`. Any thread may call it, one at a time.

        Args:
            number: its place in the lists of `finish`.
            response: without its prompt.
            row: of the data set that it answers.
        """

    @abstractmethod
    def finish(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """The scores of N responses, those that were not announced included.

        Args:
            responses: N texts, without their prompts.
            rows: the N rows of the data set that they answer.
        """

    def cancel(self) -> None:
        """Gives up what is being scored, where the block ends in an error."""


class ScoringAtEnd(Scoring):
    """Scores all responses in `finish`.

    Args:
        score: of (responses, rows).
    """

    def __init__(self, score: Callable[[Sequence[str], Sequence[Mapping[str, Any]]], Scores]) -> None:
        self._score = score

    def finish(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        return self._score(responses, rows)


def is_scored(scores: Tensor) -> Tensor:
    """True where there is a score, (N,) bool.

    Args:
        scores: (N,); NaN where there is none.
    """
    return ~scores.isnan()


def count_unscored(batch: TensorDict) -> Counter[str]:
    """Rows of a sampled batch without a score, and the terms that gave none, by reason.

    Returns:
        `unscored`: rows that do not train; `<term>/unscored`: rows that the term did not score; and
        `<term>/unscored/<reason>`. Names without a row are absent.
    """
    found = Counter({UNSCORED: int(batch["scores"].isnan().sum())})
    for row in fields(batch):
        for term, reason in row.get(UNSCORED_FIELD, {}).items():
            found.update([f"{term}/{UNSCORED}", f"{term}/{UNSCORED}/{spell_reason(reason)}"])
    return +found


def spell_reason(reason: str) -> str:
    """A reason as a part of a metric's name: what stands before its first colon, in letters, digits and `_`."""
    words = "".join(letter if letter.isalnum() else " " for letter in reason.partition(":")[0])
    return "_".join(words[:LONGEST_NAME].split()) or OTHER


def number_or_none(value: float) -> float | None:
    """A value as JSON has it: None for the NaN of an unscored response."""
    return None if math.isnan(value) else float(value)


def mean_of_scored(values: Iterable[float]) -> float:
    """The mean of the values that are not NaN; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
