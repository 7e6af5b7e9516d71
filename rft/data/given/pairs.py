"""Batches of given preferences: pairs of a better and a worse response, or single responses that are good or bad."""

from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import DatasetSource
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.metrics import Metrics

TRUTHS = {"true": True, "1": True, "false": False, "0": False}  # files of text have no others


class PairSource(DatasetSource):
    """Draws pairs: a prompt with a chosen and a rejected response, two rows that train and stay together.

    Args:
        world, encoder, rows, prompts, seed: supplied; `prompts` is the number of pairs of a step over all ranks.
        chosen, rejected: the fields that hold the two responses.
        margin: the field that says how much better the chosen one is, a number, or null.
    """

    writes = (*SOURCE_COLUMNS, "chosen")
    can_write = ("margin",)

    def __init__(
        self,
        world: World,
        encoder: Encoder,
        rows: Rows,
        prompts: int,
        seed: int,
        chosen: str,
        rejected: str,
        margin: str | None,
    ) -> None:
        super().__init__(world, encoder, rows, prompts, seed, chosen)
        self._rejected = rejected
        self._margin = margin

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        fields = (options["chosen"], options["rejected"], options["margin"])
        return ("prompt", *(field for field in fields if field is not None))

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's pairs of the next step, two rows each, the chosen one first."""
        return collate([row for position, pair in self._drawn() for row in self._pair(position, pair)])

    def _pair(self, position: int, pair: dict[str, Any]) -> list[dict[str, Any]]:
        margin = {} if self._margin is None else {"margin": _number(pair[self._margin], self._margin)}
        return [
            self._example(position, pair, pair[field]) | {"chosen": chosen} | margin
            for field, chosen in ((self._response, True), (self._rejected, False))
        ]


class LabelledSource(DatasetSource):
    """Draws responses that are labelled good or bad, each with a mismatched row: the next one's, behind its prompt.

    A mismatched row is there to be measured: it tells how far the policy is from the reference on what has nothing to
    do with the prompt (KTO, arXiv 2402.01306, section 4.1). The next one of the last row of a step is its first.

    Args:
        world, encoder, rows, prompts, seed: supplied; `prompts` is the number of responses of a step over all ranks.
        response: the field that holds the response.
        label: the field that is true where the response is good.

    Raises:
        ValueError: a step has one response alone.
    """

    writes = (*SOURCE_COLUMNS, "label", "mismatched")

    def __init__(
        self,
        world: World,
        encoder: Encoder,
        rows: Rows,
        prompts: int,
        seed: int,
        response: str,
        label: str,
    ) -> None:
        super().__init__(world, encoder, rows, prompts, seed, response)
        self._label = label
        if prompts < 2:
            raise ValueError("batch.prompts=1: a response needs another one's prompt beside it; set it to 2 or more")

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        return ("prompt", options["response"], options["label"])

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's responses of the next step, and behind each its mismatched row."""
        taken = self._sampler.take(self._prompts)
        pairs = list(zip(taken, [*taken[1:], taken[0]], strict=True))[self._world.rank :: self._world.size]
        rows = []
        for (position, own), (_, other) in pairs:
            row = self._rows[own]
            for source, mismatched in ((row, False), (self._rows[other], True)):
                example = self._example(position, row, source[self._response])
                label = _truth(row[self._label], self._label)
                rows.append(example | {"label": label, "mismatched": mismatched})
        return collate(rows)


def _number(value: Any, field: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"algorithm.source.margin={field}: {value!r} in that field of a row is no number; name another field"
        ) from None


def _truth(value: Any, field: str) -> bool:
    if (spelt := str(value).lower()) not in TRUTHS:
        raise ValueError(
            f"algorithm.source.label={field}: {value!r} in that field of a row is not true or false; name another field"
        )
    return TRUTHS[spelt]
