"""Decodes a wave: the newest token of each row goes in, and the next one is drawn from the logits behind it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import record_function
from transformers import Cache, PreTrainedModel

from rft.actor.forward.logits import forbid_
from rft.rollout.engine.decoding.fused_step import FusedStep
from rft.rollout.engine.decoding.step_attention import attends_by_step, step_obstacle
from rft.rollout.engine.kv_cache import keep_rows
from rft.rollout.engine.sampling import Sampling, draw, stream


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


def refusal(reason: str) -> ValueError:
    """The error of a run whose steps cannot be recorded."""
    return ValueError(f"rollout.engine.cuda_graphs=true: {reason}; set rollout.engine.cuda_graphs=false")
