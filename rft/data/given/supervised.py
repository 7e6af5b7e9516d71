"""Batches of given texts: supervised rows of a data set."""

from typing import Any

import torch
from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.data.sampler import make_sampler
from rft.distributed import World
from rft.metrics import Metrics


def supervised_row(encoder: Encoder, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
    """What `collate` takes of a row with a response; `position` is its group and its unit."""
    return example_row(position, row, *encoder.example({**row, "response": response}))


def example_row(position: int, row: dict[str, Any], ids: list[int], trains: list[bool]) -> dict[str, Any]:
    """What `collate` takes of T ids, and of T flags that say which of them train."""
    return {
        "tokens": {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64)},
        "response_mask": torch.tensor(trains),
        "group": position,
        "unit": position,
        "truncated": False,
        "fields": row,
    }


class DatasetSource:
    """Draws supervised rows: a prompt, and a response that trains.

    Args:
        world, encoder, rows, prompts, seed: supplied; `prompts` is the number of rows of a step over all ranks.
        response: the field that holds the response.
    """

    writes: tuple[str, ...] = SOURCE_COLUMNS
    can_write: tuple[str, ...] = ()
    temperature = 1.0

    def __init__(self, world: World, encoder: Encoder, rows: Rows, prompts: int, seed: int, response: str) -> None:
        self._world = world
        self._encoder = encoder
        self._rows = rows
        self._prompts = prompts
        self._response = response
        self._sampler = make_sampler(rows, seed)

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        return ("prompt", options["response"])

    def samples(self) -> bool:
        """See `Source.samples`."""
        return False

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step."""
        return collate([self._example(position, row, row[self._response]) for position, row in self._drawn()])

    def _drawn(self) -> list[tuple[int, dict[str, Any]]]:
        """This rank's share of the next step: positions, and the rows of the data set there."""
        mine = self._sampler.take(self._prompts)[self._world.rank :: self._world.size]
        return [(position, self._rows[row]) for position, row in mine]

    def _example(self, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
        return supervised_row(self._encoder, position, row, response)

    def state_dict(self) -> dict[str, Any]:
        """Where in the data this source is."""
        return self._sampler.state_dict()

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes up the states of all ranks of the run that wrote them."""
        self._sampler.load_state_dict(states[0])


class TextSource(DatasetSource):
    """Draws rows of which one field holds everything: a conversation whose answers train, or a text that trains.

    Args:
        world, encoder, rows, prompts, seed: supplied; `prompts` is the number of rows of a step over all ranks.
        response: the field that holds chat messages, or a text.
    """

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        return (options["response"],)

    def _example(self, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
        return super()._example(position, row | {"prompt": None}, response) | {"fields": row}
