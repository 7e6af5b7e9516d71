"""Torch's flex attention: one compiled kernel that leaves out the blocks in which no token sees another."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rft.actor.packing.kernels.base import AttentionKernel, AttentionRule
from rft.actor.packing.layout import Segments
from rft.batch.device import to_device


class FlexKernel(AttentionKernel):
    """Calls flex attention for the whole sequence, with a mask of the tokens that each one sees."""

    implementation: ClassVar[str] = "rft_packed_blocks"
    opaque: ClassVar[bool] = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
        cap, sinks = rule.softcap, rule.sinks
        out, lse = _function(query.device.type)(
            query,
            key,
            value,
            score_mod=None if cap is None else _capped(cap),
            block_mask=rows_mask(segments, rule.window, query.device),
            scale=rule.scaling,
            enable_gqa=key.shape[1] != query.shape[1],
            return_lse=True,
        )  # (1, H, N, D), (1, H, N)
        if sinks is not None:  # one more key without a value leaves exp(lse) / (exp(lse) + exp(sink)) of the result
            out = out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])[..., None]
        return out.to(value.dtype).transpose(1, 2)


@cache
def _function(device: str) -> Callable[..., Any]:
    """Compiled where there are kernels: without, it writes all products down."""
    function: Callable[..., Any] = flex_attention
    return torch.compile(function, dynamic=True) if device == "cuda" else function


@lru_cache(maxsize=64)  # one function for each bound: another one is compiled again
def _capped(cap: float) -> Callable[..., Tensor]:
    def bounded(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bounded


@lru_cache(maxsize=8)  # the layers of a forward share them
def rows_mask(segments: Segments, window: int | None, device: torch.device) -> BlockMask:
    """The keys that each token of a packed sequence sees: those of its row up to itself, and those of its prefix."""
    rows: list[Tensor] = []  # the number of the row of each token
    prefixes: list[Tensor] = []  # the number of the row that is its prefix, or -1
    positions: list[Tensor] = []
    firsts: list[int] = []  # the number of the first row of each segment
    count = 0
    for segment in segments:
        firsts.append(count)
        size = segment.rows * segment.length
        before, prefix = 0, -1
        if segment.prefix is not None:
            before, prefix = segments[segment.prefix].length, firsts[segment.prefix]
        rows.append(torch.arange(count, count + segment.rows).repeat_interleave(segment.length))
        prefixes.append(torch.full((size,), prefix))
        positions.append(torch.arange(before, before + segment.length).repeat(segment.rows))
        count += segment.rows
    row, prefix_row, position = (to_device(torch.cat(parts), device) for parts in (rows, prefixes, positions))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (row[query] == row[key]) | (prefix_row[query] == row[key])
        distance = position[query] - position[key]
        seen = near & (distance >= 0)
        return seen if window is None else seen & (distance < window)

    return create_block_mask(sees, None, None, len(row), len(row), device=device, _compile=device.type == "cuda")
