"""A batch source of one's own: it implements `GivenSource` alone. It draws the rows in the order of the data."""

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.trajectory import Trajectory, given_segments, to_row
from rft.data.base import CheckContext, GivenSource, SourceContext, SourceFacts
from rft.metrics import Metrics


class ListedSource(GivenSource):
    """Draws rows in the order of the data set, each with the same suffix behind its response.

    Args:
        context: of the stage.
        response: the field of a row that trains.
        suffix: a text behind it.
    """

    def __init__(self, context: SourceContext, *, response: str, suffix: str) -> None:
        self.context = context
        self.response = response
        self.suffix = suffix
        self.position = 0  # rows that all ranks together have drawn

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        return SourceFacts(writes=SOURCE_COLUMNS, fields=("prompt", options["response"]), sampled="never")

    @classmethod
    def check(cls, options: Mapping[str, Any], context: CheckContext) -> None:
        if len(options["suffix"]) > 3:
            raise ValueError(f"{context.key}.suffix={options['suffix']}: it has more than 3 characters; shorten it")

    def samples(self) -> bool:
        return False

    def next(self, metrics: Metrics) -> TensorDict:
        world, prompts = self.context.world, self.context.prompts
        rows = []
        for position in range(self.position + world.rank, self.position + prompts, world.size):
            rows += self.texts(position, self.context.rows[position % len(self.context.rows)])
        self.position += prompts
        return collate(rows)

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        ids, trains = self.context.encoder.example({**row, "response": row[self.response] + self.suffix})
        return [to_row(Trajectory(given_segments(ids, trains), None, row), group=position, unit=position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
