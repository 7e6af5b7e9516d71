"""Decode steps of fixed shapes, which a GPU replays as CUDA graphs: `rollout.engine.cuda_graphs=true`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function
from transformers import Cache

from rft.rollout.engine.decoding.decoder import Decoder, refusal
from rft.rollout.engine.kv_cache import LABEL, GrowingLayer, grown
from rft.rollout.engine.sampling import draws_on_device

RECORDED = "cuda"  # the device whose steps are recorded


Result = TypeVar("Result")


class StaticLayer(GrowingLayer):
    """The storage of a growing layer as it is, for steps of fixed shapes, which a CUDA graph may record.

    A step writes one token at a place that is a tensor, and reads the whole storage: the attention mask leaves out what
    is not written yet.

    Args:
        layer: its storage becomes that of this layer.
        place: (1,) where the next token is written; all layers share it.
    """

    def __init__(self, layer: GrowingLayer, place: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(*layer._storage)
        self._store(*layer._storage, layer._storage[0].shape[2])
        self._place = place

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes the states (R, heads, 1, width) of a token and returns the whole storage; again has no effect."""
        self.keys.index_copy_(2, self._place, key_states)
        self.values.index_copy_(2, self._place, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        """The length before the next token, which only the device knows."""
        return self._place[0]

    @property
    def capacity(self) -> int:
        """Tokens for which the storage has room."""
        return self.keys.shape[2]

    def grow(self) -> None:
        """Moves to a storage for more tokens."""
        with record_function(LABEL):
            storage = [grown(states, states.shape[2] + 1) for states in self._storage]
            self._store(storage[0], storage[1], storage[0].shape[2])


def make_static(cache: Cache, place: Tensor) -> list[StaticLayer]:
    """Makes the layers of a growing cache static, and returns them; see `StaticLayer`."""
    layers = [StaticLayer(layer, place) for layer in cache.layers if isinstance(layer, GrowingLayer)]
    assert len(layers) == len(cache.layers), "sliding and linear layers cannot be static"
    cache.layers = list(layers)
    return layers


class CudaGraph(Generic[Result]):
    """A function without arguments, recorded on the current device. It is not computed until the first replay.

    Args:
        function: reads no number of the device, and the tensors that it reads and changes keep their addresses. It was
            called before, since what libraries do at their first call cannot be recorded.
        name: of the model, for messages.

    Raises:
        ValueError: the function cannot be recorded; names the key and the cure.
    """

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may use the device
                self._result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise refusal(f"a step of {name} cannot be recorded ({str(error).splitlines()[0]})") from error

    def replay(self) -> Result:
        """Computes the function. The next call overwrites the tensors of the result."""
        self._graph.replay()
        return self._result


@dataclass(eq=False)
class StaticDecoder(Decoder):
    """Decodes in steps of fixed shapes, which a GPU replays as a CUDA graph.

    A graph holds the addresses of the weights, of the cache and of the rows. It belongs to one wave, in which no weight
    is replaced. Another one is recorded when rows are compacted, to a power of two, and when the cache grows, by one
    half. The draw is in the graph, unless it needs a number on the host.
    """

    ahead: ClassVar[int] = 8  # the host waits for the device once in so many steps

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layers = make_static(self.cache, self._place)
        self._replay: Callable[[], None] | None = None

    def rows_for(self, live: int) -> int:
        """The next power of two, so that few graphs are recorded."""
        return 1 << (live - 1).bit_length()

    def keep(self, rows: Tensor) -> None:
        self._replay = None
        super().keep(rows)

    def step(self) -> None:
        """The first step of new shapes is not replayed: it prepares what libraries need."""
        if self.prompt + self.drawn > self._layers[0].capacity:
            self._replay = None
            for layer in self._layers:
                layer.grow()
        if self._replay is not None:
            self._replay()
        else:
            self._step()
            if self._place.device.type == RECORDED:
                self._replay = self._record()
        self.drawn += 1

    def _record(self) -> Callable[[], None]:
        name = type(self.model).__name__
        if draws_on_device(self.sampling):
            return CudaGraph(self._step, name).replay
        logits = CudaGraph(self._logits, name)
        return lambda: self._take(logits.replay(), self.sampling)

    def _logits(self) -> Tensor:
        """Like the draw, it reads no number, and no input but tensors that keep their addresses."""
        columns = torch.arange(self._layers[0].capacity, device=self._place.device)
        seen = (columns >= self.rows.padding[:, None]) & (columns <= self._place)  # (R, T)
        return self._logits_by_step(seen, (self._place - self.rows.padding)[:, None])
