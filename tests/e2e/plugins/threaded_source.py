"""A source that prepares its next batch in a thread while the trainer works on this one."""

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tensordict import TensorDict

from rft.data.base import GivenSource, SourceContext, SourceFacts
from rft.data.given.supervised import DatasetSource
from rft.metrics import Metrics

PREPARED_BY: list[str] = []  # the thread that prepared each batch, for the test


class ThreadedSource(GivenSource):
    """The batches of a `DatasetSource`, one step ahead. The thread takes part in no collective.

    Args:
        context: of the stage.
        response: the field of a row that trains.
    """

    def __init__(self, context: SourceContext, *, response: str) -> None:
        self.source = DatasetSource(context, response=response)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self.delivered = self.source.state_dict()  # the place in the data behind the last batch that was taken
        self.prepared: Future[tuple[TensorDict, dict[str, Any]]] | None = None

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        return DatasetSource.facts(options)

    def samples(self) -> bool:
        return False

    def next(self, metrics: Metrics) -> TensorDict:
        waiting = self.prepared or self.thread.submit(self.prepare)
        batch, self.delivered = waiting.result()
        self.prepared = self.thread.submit(self.prepare)
        return batch

    def prepare(self) -> tuple[TensorDict, dict[str, Any]]:
        """The next batch, and the place in the data behind it."""
        PREPARED_BY.append(threading.current_thread().name)
        batch = self.source.next(Metrics())
        return batch, copy.deepcopy(self.source.state_dict())

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        return self.source.texts(position, row)

    def state_dict(self) -> dict[str, Any]:
        return self.delivered  # the batch that waits is drawn again

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.prepared is not None:
            self.prepared.result()  # the thread uses the source no more
        self.prepared = None
        self.source.load_state_dict(state)
        self.delivered = state
