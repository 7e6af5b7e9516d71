"""The hooks of mode=plan in the calls of models: columns get numbers, and few micro-batches are computed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tensordict import TensorDict

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

    def on_compute(
        self, model: ColumnModel, batch: TensorDict, outputs: tuple[str, ...], compute: Callable[[], Columns]
    ) -> Columns:
        """Columns with numbers, so that the rest of the step can compute with them. Remote models are not called."""
        if model.remote or any(model is known for known in self.blank):
            return model.blank(batch, outputs)
        columns = compute()
        self._skip.materialize(columns.values())
        return columns

    def on_micro_batches(self, model: ColumnModel, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The first micro-batches, up to the limit."""
        for number, micro in enumerate(micro_batches, start=1):
            yield replace(micro, last=True) if number == self.limit else micro
            if number == self.limit:
                return
