"""Decodes a wave: the newest token of each row goes in, and the next one is drawn from the logits behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function
from transformers import Cache, PreTrainedModel

from rft.actor.forward.logits import forbid_
from rft.rollout.engine.decoding.fused_step import FusedStep
from rft.rollout.engine.decoding.step_attention import attends_by_step, step_obstacle
from rft.rollout.engine.kv_cache import keep_rows, make_static
from rft.rollout.engine.sampling import Sampling, draw, draws_on_device, stream

RECORDED = "cuda"  # the device whose steps are recorded
Result = TypeVar("Result")


@dataclass
class Rows:
    """What decoding knows of R rows.

    Attributes:
        numbers: (R,) of the rows in their wave.
        padding: (R,) tokens before each row.
        streams: (R,) random streams.
        caps: (R,) most tokens that are sampled.
        deltas: (R, 1) added to the positions of a model that counts them in several dimensions; else None.
        tokens: (R,) the newest token.
        live: (R,) bool, whether a row has not ended.
        padded: whether a row of the wave has padding.
        most: the largest cap of the wave.
    """

    numbers: Tensor
    padding: Tensor
    streams: Tensor
    caps: Tensor
    deltas: Tensor | None
    tokens: Tensor
    live: Tensor
    padded: bool
    most: int

    @classmethod
    def of(
        cls, padding: list[int], seeds: list[int], limits: list[int], deltas: Tensor | None, device: torch.device
    ) -> "Rows":
        """All rows of a wave, before a token is sampled."""
        pads = torch.tensor(padding, device=device)
        return cls(
            numbers=torch.arange(len(pads), device=device),
            padding=pads,
            streams=stream(seeds).to(device),
            caps=torch.tensor(limits, device=device),
            deltas=deltas,
            tokens=torch.zeros_like(pads),
            live=torch.ones_like(pads, dtype=torch.bool),
            padded=any(padding),
            most=max(limits),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def compacted(self, size: int) -> Tensor:
        """The first `size` rows (size,), with all live ones: those behind take the places of rows that have ended."""
        rows = torch.arange(size, device=self.live.device)
        behind = self.live[size:].nonzero().squeeze(1) + size
        rows[(~self.live[:size]).nonzero().squeeze(1)[: len(behind)]] = behind
        return rows

    def keep(self, rows: Tensor) -> None:
        """Keeps these rows (R',) alone, in new tensors."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])


@dataclass(eq=False)
class Decoder:
    """Decodes with a cache that grows by one token a step.

    Args:
        model: a causal language model that returns the logits of the last token alone.
        cache: of R rows, behind the prompts of a wave, which end at one place.
        rows: all rows of the wave.
        prompt: tokens of the longest prompt.
        sampling: how tokens are drawn.
        forbidden: see `forbidden_logits`.
        fused: computes the steps in the place of the model; None: the model computes them.

    Attributes:
        ahead: steps after which the engine looks which rows have ended. Tokens behind an end have no use.
        drawn: number of tokens that the rows have drawn.
        tokens: (W, T) int64, drawn by the W rows of the wave, by their numbers.
        logprobs: (W, T) float32, of the tokens.
    """

    model: PreTrainedModel
    cache: Cache
    rows: Rows
    prompt: int
    sampling: Sampling
    forbidden: Tensor | None
    fused: FusedStep | None
    ahead: ClassVar[int] = 1

    def __post_init__(self) -> None:
        rows = self.rows
        self.drawn = 0
        self.tokens = rows.tokens.new_zeros(len(rows), rows.most)
        self.logprobs = torch.zeros(len(rows), rows.most, device=rows.tokens.device)
        # where the newest token of a row is in the cache, padding included
        self._place = torch.full((1,), self.prompt - 1, dtype=torch.int64, device=rows.tokens.device)
        self._by_step = rows.padded and rows.deltas is None and step_obstacle(self.model) is None

    def rows_for(self, live: int) -> int:
        """To how many rows a batch with so many live ones is compacted."""
        return live

    def keep(self, rows: Tensor) -> None:
        """Keeps these rows (R',) alone; see `keep_rows`."""
        keep_rows(self.cache, rows)
        self.rows.keep(rows)

    def take(self, logits: Tensor, sampling: Sampling) -> None:
        """Draws a token of each row from logits (R, V)."""
        self._take(logits, sampling)
        self.drawn += 1

    def step(self) -> None:
        """Draws a token of each row from the logits behind its newest one."""
        self._step()
        self.drawn += 1

    def _step(self) -> None:
        self._take(self._logits(), self.sampling)

    def _take(self, logits: Tensor, sampling: Sampling) -> None:
        column = self._place - (self.prompt - 1)
        with record_function("logits"):  # mode=plan counts what is allocated under this label
            tokens, logprobs = draw(forbid_(logits, self.forbidden), self.rows.streams, column, sampling)  # (R,)
        self.tokens[self.rows.numbers, column] = tokens
        self.logprobs[self.rows.numbers, column] = logprobs
        self.rows.tokens.copy_(tokens)
        self._place += 1

    def _logits(self) -> Tensor:
        """The logits (R, V) behind the newest tokens."""
        rows, positions, seen = self.rows, self._place[:, None], None
        if rows.padded:
            positions = (self._place - rows.padding)[:, None]  # (R, 1)
            columns = torch.arange(self.prompt + self.drawn, device=positions.device)
            seen = columns >= rows.padding[:, None]  # (R, T)
        if self.fused is not None:
            return self.fused(rows.tokens, positions, self.cache, seen)
        if seen is not None and self._by_step:
            return self._logits_by_step(seen, positions)
        masks: dict[str, Tensor] = {} if seen is None else {"attention_mask": seen, "position_ids": positions}
        if rows.deltas is not None:
            masks["position_ids"] = positions + rows.deltas
        return self._forward(**masks)

    def _logits_by_step(self, seen: Tensor, positions: Tensor) -> Tensor:
        """The logits (R, V) of a model whose layers attend by `step_attention` where `seen` (R, T) is true."""
        with attends_by_step(self.model.config):
            return self._forward(attention_mask=seen[:, None, None], position_ids=positions)

    def _forward(self, **masks: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        logits: Tensor = self.model(input_ids=self.rows.tokens[:, None], **inputs, **masks).logits[:, -1]
        return logits


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


def refusal(reason: str) -> ValueError:
    """The error of a run whose steps cannot be recorded."""
    return ValueError(f"rollout.engine.cuda_graphs=true: {reason}; set rollout.engine.cuda_graphs=false")


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
