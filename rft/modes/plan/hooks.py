"""The hooks of mode=plan in the calls of models: columns get numbers, and few micro-batches are computed."""

from collections.abc import Iterator
from dataclasses import replace

from rft.actor.base import ColumnModel, Columns, ModelHooks
from rft.actor.packing.micro_batches import MicroBatch
from rft.modes.plan.skip_compute import SkipCompute


class PlanHooks(ModelHooks):
    """The hooks of every model of a planned run.

    Args:
        skip: the active mode, under which models compute placeholders.

    Attributes:
        limit: micro-batches that a call computes at most; None for all. The fullest come first, and all of them take
            the same memory.
        blank: models whose columns are not computed any more: they return zeros.
    """

    def __init__(self, skip: SkipCompute) -> None:
        self.limit: int | None = None
        self.blank: list[ColumnModel] = []
        self._skip = skip

    def is_blank(self, model: ColumnModel) -> bool:
        """Remote models are not called, and those in `blank` neither."""
        return model.remote or any(model is known for known in self.blank)

    def on_columns(self, model: ColumnModel, columns: Columns) -> None:
        """The columns get numbers, so that the rest of the step can compute with them."""
        self._skip.materialize(columns.values())

    def on_micro_batches(self, model: ColumnModel, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The first micro-batches, up to the limit."""
        for number, micro in enumerate(micro_batches, start=1):
            yield replace(micro, last=True) if number == self.limit else micro
            if number == self.limit:
                return
