"""A source that prepares its next batch in a thread while the trainer works on this one."""

import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tensordict import TensorDict

from rft.data.base import SourceContext
from rft.data.given.supervised import DatasetOptions, DatasetSource
from rft.metrics import Metrics

PREPARED_BY: list[str] = []  # the thread that prepared each batch, for the test


class ThreadedSource(DatasetSource):
    """The batches of a `DatasetSource`, one step ahead. The thread takes part in no collective."""

    def __init__(self, options: DatasetOptions, context: SourceContext) -> None:
        super().__init__(options, context)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self.delivered = super().state_dict()  # the place in the data behind the last batch that was taken
        self.prepared: Future[tuple[TensorDict, dict[str, Any]]] | None = None

    def next(self, metrics: Metrics) -> TensorDict:
        waiting = self.prepared or self.thread.submit(self.prepare)
        batch, self.delivered = waiting.result()
        self.prepared = self.thread.submit(self.prepare)
        return batch

    def prepare(self) -> tuple[TensorDict, dict[str, Any]]:
        """The next batch, and the place in the data behind it."""
        PREPARED_BY.append(threading.current_thread().name)
        batch = super().next(Metrics())
        return batch, copy.deepcopy(super().state_dict())

    def state_dict(self) -> dict[str, Any]:
        return self.delivered  # the batch that waits is drawn again

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.prepared is not None:
            self.prepared.result()  # the thread draws no more
        self.prepared = None
        super().load_state_dict(state)
        self.delivered = state
