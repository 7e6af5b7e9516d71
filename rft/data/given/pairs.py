"""Batches of given preferences: pairs of a better and a worse response, or single responses that are good or bad."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import GIVEN_COLUMNS
from rft.data.base import CheckContext, GivenSource, SourceContext, SourceFacts, SourceOptions
from rft.data.given.supervised import DatasetOptions, given_facts, row_number, supervised_row
from rft.data.rows.base import StreamedRows
from rft.data.rows.lazy import Row, located
from rft.metrics import Metrics

ONE_PROMPT = "all rows {} (KTO compares a response with one to another prompt)"
TRUTHS = {"true": True, "1": True, "false": False, "0": False}  # spellings in text files


@dataclass(frozen=True, kw_only=True)
class PairOptions(SourceOptions):
    """Options of `PairSource`.

    Attributes:
        chosen, rejected: the fields that hold the two responses.
        margin: the field with a number that states how much better the chosen response is, or null.
        weight: the field with a number from 0 on that says what a pair counts in the loss beside the others, or null.
    """

    chosen: str
    rejected: str
    margin: str | None
    weight: str | None = None

    def facts(self) -> SourceFacts:
        margin = self.margin
        writes = (*GIVEN_COLUMNS, "chosen", *(("margin",) if margin is not None else ()))
        fields = ("prompt", self.chosen, self.rejected, *((margin,) if margin is not None else ()))
        return given_facts(self.weight, fields, writes)

    def check(self, context: CheckContext) -> None:
        """Checks that a function reads the margin, if there is one."""
        if self.margin is not None and context.reads is not None and "margin" not in context.reads:
            raise ValueError(f"{context.key}.margin={self.margin}: no function reads 'margin'; set it to null")


class PairSource(GivenSource):
    """Draws pairs: a prompt with a chosen and a rejected response, two rows that train and stay together."""

    Options = PairOptions
    options: PairOptions

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The two rows of a pair, the chosen one first."""
        options, encoder = self.options, self.context.encoder
        margin = {} if options.margin is None else {"margin": row_number(row, "margin", options.margin)}
        return [
            supervised_row(encoder, position, row, row[field], options.weight) | {"chosen": chosen} | margin
            for field, chosen in ((options.chosen, True), (options.rejected, False))
        ]


@dataclass(frozen=True, kw_only=True)
class LabelledOptions(DatasetOptions):
    """Options of `LabelledSource`.

    Attributes:
        label: the field that is true if the response is good.
    """

    label: str

    def facts(self) -> SourceFacts:
        fields = ("prompt", self.response, self.label)
        return given_facts(self.weight, fields, (*GIVEN_COLUMNS, "label", "mismatched"))

    def check(self, context: CheckContext) -> None:
        """Checks that a step has at least two responses, which mismatched rows need."""
        if context.prompts == 1:
            raise ValueError(
                "batch.prompts=1: a mismatched row takes the response of another row of the step; set it to 2 or more"
            )


class LabelledSource(GivenSource):
    """Draws responses that are labelled good or bad, each with a mismatched row: its prompt with another response.

    A mismatched row does not train. The loss uses it to estimate the KL divergence between the policy and the reference
    (KTO, arXiv 2402.01306, section 4.1). Its response is that of the next row of the step with another prompt; behind
    the last row comes the first. If all rows of the step have one prompt, it is that of the next such row of the data.
    A mismatched row with too many tokens is cut, whatever `data.overlong` says.

    Raises:
        ValueError: all rows of the data set have one prompt.
    """

    Options = LabelledOptions
    options: LabelledOptions

    def __init__(self, options: LabelledOptions, context: SourceContext) -> None:
        super().__init__(options, context)
        rows = context.rows
        if not isinstance(rows, StreamedRows) and all(row["prompt"] == rows[0]["prompt"] for row in rows):
            raise ValueError(ONE_PROMPT.format("have one prompt; add rows with others"))

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's responses of the next step, each followed by its mismatched row."""
        context = self.context
        taken = self.row_sampler.take(context.prompts)
        rows = []
        for place in range(len(taken))[context.share]:
            position, own = taken[place]
            row = context.rows[own]
            with located(context.rows, own):
                [labelled] = self.texts(position, row)
                following = (taken[(place + more) % len(taken)][1] for more in range(1, len(taken)))
                response = self._of_another_prompt(row, following, own)[self.options.response]
                mismatched = supervised_row(context.encoder, position, row, response, overlong="truncate")
                rows += [labelled, labelled | mismatched | {"mismatched": True}]
        return collate(rows)

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The row itself, without a mismatched one."""
        options, label = self.options, _truth(row[self.options.label], self.options.label)
        made = supervised_row(self.context.encoder, position, row, row[options.response], options.weight)
        return [made | {"label": label, "mismatched": False}]

    def _of_another_prompt(self, row: Row, following: Iterable[int], own: int) -> Row:
        """The first row of those that follow in the step, or else in the data set, with another prompt."""
        rows = self.context.rows
        elsewhere = () if isinstance(rows, StreamedRows) else chain(range(own + 1, len(rows)), range(own))
        for number in chain(following, elsewhere):
            if (other := rows[number])["prompt"] != row["prompt"]:
                return other
        raise ValueError(ONE_PROMPT.format("of a step have one prompt; raise batch.prompts"))


def _truth(value: Any, field: str) -> bool:
    if (spelt := str(value).lower()) not in TRUTHS:
        raise ValueError(
            f"algorithm.source.label={field}: {value!r} in that field of a row is not true or false; name another field"
        )
    return TRUTHS[spelt]
