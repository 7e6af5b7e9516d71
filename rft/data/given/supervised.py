"""Batches of given texts: supervised rows of a data set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rft.batch.columns import GIVEN_COLUMNS
from rft.batch.trajectory import Trajectory, given_segments, to_row
from rft.data.base import GivenSource, SourceFacts, SourceOptions
from rft.data.encode.encoder import Encoder
from rft.data.encode.truncation import Overlong


def supervised_row(
    encoder: Encoder,
    position: int,
    row: dict[str, Any],
    response: Any,
    weight: str | None = None,
    overlong: Overlong | None = None,
) -> dict[str, Any]:
    """The batch row of a prompt with a response, with the column `token_weights` (T,).

    Args:
        position: its group and its unit.
        weight: the field of the column `row_weights`, or None.
        overlong: see `Encoder.weighted_example`.

    Raises:
        ValueError: as of `Encoder.weighted_example` and `row_number`, or a token that trains stands for a character
            without one.
    """
    answered = {**row, "response": response}
    ids, weights = encoder.weighted_example(answered, overlong)
    encoder.unknown.check(answered, ids, weights)
    made = given_row(position, row, ids, [weight > 0 for weight in weights])
    made |= {"token_weights": torch.tensor(weights, dtype=torch.float32)}
    return made if weight is None else made | {"row_weights": row_number(row, "weight", weight, 0)}


def given_row(position: int, row: dict[str, Any], ids: Sequence[int], trains: Sequence[bool]) -> dict[str, Any]:
    """The batch row of a given text.

    Args:
        position: its group and its unit.
        row: the row of the data set.
        ids: T token ids.
        trains: T flags that are True where the token trains.
    """
    return to_row(Trajectory(given_segments(ids, trains), None, row), group=position, unit=position)


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(SourceOptions):
    """Options of `DatasetSource`.

    Attributes:
        response: the field that holds the response.
        weight: the field with a number from 0 on that says what a row counts in the loss beside the others, or null.
    """

    response: str
    weight: str | None = None

    def facts(self) -> SourceFacts:
        return given_facts(self.weight, ("prompt", self.response))


class DatasetSource(GivenSource):
    """Draws supervised rows: a prompt, and a response that trains."""

    Options: ClassVar[type[SourceOptions]] = DatasetOptions
    options: DatasetOptions

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        options = self.options
        return [supervised_row(self.context.encoder, position, row, row[options.response], options.weight)]


class TextOptions(DatasetOptions):
    """Options of `TextSource`; `response` is the field that holds chat messages, or a text."""

    def facts(self) -> SourceFacts:
        return given_facts(self.weight, (self.response,))


class TextSource(DatasetSource):
    """Draws rows in which one field holds the full text: a conversation whose answers train, or a text that trains."""

    Options = TextOptions

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        [text] = super().texts(position, row | {"prompt": None})
        return [text | {"fields": row}]


def given_facts(weight: str | None, fields: tuple[str, ...], writes: tuple[str, ...] = GIVEN_COLUMNS) -> SourceFacts:
    """The facts of a source whose rows may have weights.

    Args:
        weight: the field with the weight, or None.
        fields, writes: without the weight.
    """
    if weight is not None:
        fields, writes = (*fields, weight), (*writes, "row_weights")
    return SourceFacts(writes, fields, sampled="never")


def row_number(row: dict[str, Any], option: str, field: str, least: float = -math.inf) -> float:
    """The number in a field of a row.

    Args:
        option: of the source, which names the field.

    Raises:
        ValueError: it is no finite number, or less than `least`.
    """
    try:
        number = float(row[field])
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        wanted = "a finite number" if least == -math.inf else f"a number from {least:g} on"
        raise ValueError(
            f"algorithm.source.{option}={field}: {row[field]!r:.60} in that field of a row is not {wanted}; name "
            "another field"
        )
    return number
