"""Batches of given texts: supervised rows of a data set."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import GIVEN_COLUMNS
from rft.batch.trajectory import Trajectory, given_segments, to_row
from rft.data.base import GivenSource, SourceContext, SourceFacts
from rft.data.encode.encoder import Encoder
from rft.data.encode.truncation import Overlong
from rft.data.rows.lazy import located
from rft.data.sampler import make_sampler
from rft.metrics import Metrics


def supervised_row(
    encoder: Encoder, position: int, row: dict[str, Any], response: Any, overlong: Overlong | None = None
) -> dict[str, Any]:
    """The batch row of a prompt with a response, with the column `token_weights` (T,).

    Args:
        position: its group and its unit.
        overlong: see `Encoder.weighted_example`.

    Raises:
        ValueError: as of `Encoder.weighted_example`, or a token that trains stands for a character without one.
    """
    answered = {**row, "response": response}
    ids, weights = encoder.weighted_example(answered, overlong)
    encoder.unknown.check(answered, ids, weights)
    made = given_row(position, row, ids, [weight > 0 for weight in weights])
    return made | {"token_weights": torch.tensor(weights, dtype=torch.float32)}


def given_row(position: int, row: dict[str, Any], ids: Sequence[int], trains: Sequence[bool]) -> dict[str, Any]:
    """The batch row of a given text.

    Args:
        position: its group and its unit.
        row: the row of the data set.
        ids: T token ids.
        trains: T flags that are True where the token trains.
    """
    return to_row(Trajectory(given_segments(ids, trains), None, row), group=position, unit=position)


class DatasetSource(GivenSource):
    """Draws supervised rows: a prompt, and a response that trains.

    Args:
        context: the context of the stage; `prompts` is the number of rows of a step.
        response: the field that holds the response.
        weight: the field with a number from 0 on that says what a row counts in the loss beside the others, or null.
    """

    def __init__(self, context: SourceContext, *, response: str, weight: str | None = None) -> None:
        self._world = context.world
        self._encoder = context.encoder
        self._rows = context.rows
        self._prompts = context.prompts
        self._response = response
        self._weight = weight
        self._row_sampler = make_sampler(context.rows, context.seed, context.shuffle)

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        """See `Source.facts`."""
        return given_facts(options, ("prompt", options["response"]))

    def samples(self) -> bool:
        """See `Source.samples`."""
        return False

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step."""
        return collate(self._draw(self.texts))

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        """See `GivenSource.texts`."""
        return [self._example(position, row, row[self._response])]

    def _draw(self, make: Callable[[int, dict[str, Any]], list[Any]]) -> list[Any]:
        """Draws this rank's share of the next step.

        Args:
            make: takes a position and its row of the data set, and returns what is made of them.

        Raises:
            ValueError: `make` raised one; names the place of the row.
        """
        made = []
        for position, number in self._row_sampler.take(self._prompts)[self._world.rank :: self._world.size]:
            with located(self._rows, number):
                made += make(position, self._rows[number])
        return made

    def _example(self, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
        made = supervised_row(self._encoder, position, row, response)
        return made if self._weight is None else made | {"row_weights": row_weight(row[self._weight], self._weight)}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self._row_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Source.load_state_dict`."""
        self._row_sampler.load_state_dict(state)


class TextSource(DatasetSource):
    """Draws rows in which one field holds the full text: a conversation whose answers train, or a text that trains.

    Args:
        context: the context of the stage; `prompts` is the number of rows of a step.
        response: the field that holds chat messages, or a text.
        weight: as of `DatasetSource`.
    """

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        """See `Source.facts`."""
        return given_facts(options, (options["response"],))

    def _example(self, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
        return super()._example(position, row | {"prompt": None}, response) | {"fields": row}


def given_facts(
    options: Mapping[str, Any], fields: tuple[str, ...], writes: tuple[str, ...] = GIVEN_COLUMNS
) -> SourceFacts:
    """The facts of a source whose rows may have weights.

    Args:
        options: those of the source; `weight` names a field or is None.
        fields, writes: without the weight.
    """
    weight = options.get("weight")
    if weight is not None:
        fields, writes = (*fields, weight), (*writes, "row_weights")
    return SourceFacts(writes, fields, sampled="never")


def row_weight(value: Any, field: str) -> float:
    """The weight of a row.

    Raises:
        ValueError: it is no number from 0 on.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(
            f"algorithm.source.weight={field}: {value!r:.60} in that field of a row is not a number from 0 on; name "
            "another field"
        )
    return number
