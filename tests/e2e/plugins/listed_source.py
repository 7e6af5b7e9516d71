"""A batch source of one's own: it implements `GivenSource` alone. It draws the rows in the order of the data."""

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.trajectory import Trajectory, given_segments, to_row
from rft.data.base import CheckContext, GivenSource, SourceContext, SourceFacts, SourceOptions
from rft.metrics import Metrics


@dataclass(frozen=True)
class ListedOptions(SourceOptions):
    """Options of `ListedSource`.

    Attributes:
        response: the field of a row that trains.
        suffix: a text behind it.
    """

    response: str
    suffix: str

    def facts(self) -> SourceFacts:
        return SourceFacts(writes=SOURCE_COLUMNS, fields=("prompt", self.response), sampled="never")

    def check(self, context: CheckContext) -> None:
        if len(self.suffix) > 3:
            raise ValueError(f"{context.key}.suffix={self.suffix}: it has more than 3 characters; shorten it")


class ListedSource(GivenSource):
    """Draws rows in the order of the data set, each with the same suffix behind its response."""

    Options = ListedOptions

    def __init__(self, options: ListedOptions, context: SourceContext) -> None:
        super().__init__(options, context)
        self.position = 0  # rows that all ranks together have drawn

    def next(self, metrics: Metrics) -> TensorDict:
        context = self.context
        rows = []
        for position in range(self.position, self.position + context.prompts)[context.share]:
            rows += self.texts(position, context.rows[position % len(context.rows)])
        self.position += context.prompts
        return collate(rows)

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        response = row[self.options.response] + self.options.suffix
        ids, trains = self.context.encoder.example({**row, "response": response})
        return [to_row(Trajectory(given_segments(ids, trains), None, row), group=position, unit=position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
