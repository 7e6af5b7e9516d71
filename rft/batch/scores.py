"""The scores of responses as a reward returns them. A response that a term could not judge has no score: NaN."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import fields

UNSCORED = "unscored"  # the entry of a row's fields: {term: reason}


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

    def add_to(self, row: dict[str, Any], number: int) -> None:
        """Adds the columns `scores` and `terms` of a response to its row, as `to_row` makes it."""
        row["scores"] = self.total[number]
        row["terms"] = {name: values[number] for name, values in self.terms.items()}
        if self.unscored[number]:
            row["fields"] = row["fields"] | {UNSCORED: self.unscored[number]}


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
        for term, reason in row.get(UNSCORED, {}).items():
            found.update([f"{term}/{UNSCORED}", f"{term}/{UNSCORED}/{spell_reason(reason)}"])
    return +found


def spell_reason(reason: str) -> str:
    """A reason as a part of a metric's name: what stands before its first colon, in letters, digits and `_`."""
    return "_".join("".join(letter if letter.isalnum() else " " for letter in reason.partition(":")[0]).split())


def number_or_none(value: float) -> float | None:
    """A value as JSON has it: None for the NaN of an unscored response."""
    return None if math.isnan(value) else float(value)


def mean_of_scored(values: Iterable[float]) -> float:
    """The mean of the values that are not NaN; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
