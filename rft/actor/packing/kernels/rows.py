"""Attention by functions over rows of any length (FlashAttention, 2307.08691), with shared prefixes and sinks.

Such a function takes queries (n, heads, width) of rows behind one another, keys and values (m, heads, width), and the
cumulative lengths of both. A row behind a shared prefix attends to itself in one call and to the prefix in another; the
results are merged by their log-sum-exp. The backward pass of a call needs only the merged result and the merged
log-sum-exp, from which it computes its part of the gradient (as in ring attention, 2310.01889). A sink is one more key
in the merge.

The functions are those of the package flash-attn (FlashAttention 3, 2407.08608, or 2, the newest that is installed), or
torch's own, which need no further package.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rft.actor.packing.kernels.base import AttentionKernel, AttentionNeeds, AttentionRule, SavedStates
from rft.actor.packing.layout import Segments
from rft.batch.device import to_device
from rft.strategy.attention import FLASH_PACKAGES, flash_package

WIDEST = 256  # numbers of a head that the functions take
MULTIPLE = 8  # of which the width of a head has to be


@dataclass(frozen=True)
class RowsCall:
    """One call of a function over rows.

    Attributes:
        queries: (n,) int64 positions of its queries in the packed sequence; None for all.
        keys: (m,) int64 positions of its keys; None for all.
        query_ends, key_ends: (rows + 1,) int32 cumulative lengths.
        longest_query, longest_key: tokens of the longest row.
        causal: the last query of a row sees all of its keys, the one before all but the last, and so on.
        window: a query sees at most so many keys; None for all.
        scaling: of the products.
        softcap: bound of the products, or None.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int | None
    scaling: float
    softcap: float | None

    @property
    def seen(self) -> dict[str, int]:
        """How many keys before and behind its own place a query sees, by the functions' names; -1 for all."""
        before = -1 if self.window is None else self.window - 1
        return {"window_size_left": before, "window_size_right": 0 if self.causal else -1}


@lru_cache(maxsize=8)  # the layers of a forward share them
def rows_calls(
    segments: Segments,
    window: int | None,
    scaling: float,
    softcap: float | None,
    device: torch.device,
) -> tuple[RowsCall, ...]:
    """The calls for a packed sequence; the first one has all queries.

    With a window that is shorter than a row behind a prefix, there is one call in which each such row has its prefix
    among its own keys.
    """
    places = torch.arange(sum(segment.rows * segment.length for segment in segments))
    segment_places = places.split([segment.rows * segment.length for segment in segments])  # of each segment
    before = [0 if segment.prefix is None else segments[segment.prefix].length for segment in segments]
    rows = [segment.length for segment in segments for _ in range(segment.rows)]
    totals = [length + segment.length for length, segment in zip(before, segments, strict=True)]  # keys of a row
    if window is not None and window >= max(totals):
        window = None

    def call(
        queries: list[Tensor],
        keys: list[Tensor],
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        causal: bool,
    ) -> RowsCall:
        """Of the places of some tokens, or of all where there are none; a window is that of causal calls."""
        ends = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (query_lengths, key_lengths)]
        return RowsCall(
            queries=to_device(torch.cat(queries), device) if queries else None,
            keys=to_device(torch.cat(keys), device) if keys else None,
            query_ends=to_device(ends[0], device),
            key_ends=to_device(ends[1], device),
            longest_query=max(query_lengths),
            longest_key=max(key_lengths),
            causal=causal,
            window=window if causal else None,
            scaling=scaling,
            softcap=softcap,
        )

    behind: dict[int, list[int]] = {}  # segments by that of their prefix
    for number, segment in enumerate(segments):
        if segment.prefix is not None:
            behind.setdefault(segment.prefix, []).append(number)
    if window is not None and behind:
        keys = [
            part
            for segment, parts in zip(segments, segment_places, strict=True)
            for row in parts.split(segment.length)
            for part in ((row,) if segment.prefix is None else (segment_places[segment.prefix], row))
        ]
        key_lengths = [total for total, segment in zip(totals, segments, strict=True) for _ in range(segment.rows)]
        return (call([], keys, rows, key_lengths, True),)
    calls = [call([], [], rows, rows, True)]
    if behind:
        queries = [torch.cat([segment_places[number] for number in numbers]) for numbers in behind.values()]
        prefixes = [segment_places[number] for number in behind]
        lengths = [[len(part) for part in parts] for parts in (queries, prefixes)]
        calls.append(call(queries, prefixes, lengths[0], lengths[1], False))
    return tuple(calls)


class RowsKernel(AttentionKernel):
    """Attention by a function over rows; a subclass calls it."""

    keeps_lse: ClassVar[bool] = True

    def refuses(self, needs: AttentionNeeds) -> str | None:
        return f"heads of {needs.width} numbers: at most {WIDEST}" if needs.width > WIDEST else None

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RowsCall) -> tuple[Tensor, Tensor]:
        """The result (n, heads, width) and its log-sum-exp (heads, n) in float32.

        Args:
            q: (n, heads, width); k, v: (m, heads or fewer, width), contiguous.
        """

    @abstractmethod
    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RowsCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v through this call.

        Args:
            gradient: of the merged result (n, heads, width).
            out, lse: of all calls, merged.
        """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
        out: Tensor = _Attend.apply(query, key, value, rule.sinks, self, segments, rule)
        return out

    def attend_forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.attend_forward`.

        Results are not changed in place: selective checkpointing keeps them for the backward pass.
        """
        width = _padded(query, value)
        q, k, v = (_rows(states, width) for states in (query, key, value))
        first, *others = _calls(query, segments, rule)
        out, lse = self.forward(q, _chosen(k, first.keys), _chosen(v, first.keys), first)  # (N, H, D), (H, N)
        for call in others:
            assert call.queries is not None
            more, its_lse = self.forward(q[call.queries], _chosen(k, call.keys), _chosen(v, call.keys), call)
            lse_before = lse[:, call.queries]
            both = torch.logaddexp(lse_before, its_lse)
            merged = out[call.queries] * _weights(lse_before - both) + more * _weights(its_lse - both)
            out = out.index_copy(0, call.queries, merged.to(out.dtype))
            lse = lse.index_copy(1, call.queries, both)
        if rule.sinks is not None:
            both = torch.logaddexp(lse, rule.sinks.to(lse.dtype)[:, None])
            out, lse = (out * _weights(lse - both)).to(out.dtype), both
        return out[None, ..., : value.shape[3]], lse

    def attend_backward(
        self, gradient: Tensor, states: SavedStates, segments: Segments, rule: AttentionRule
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        query, key, value, out, lse = states
        width = _padded(query, value)
        q, k, v = (_rows(states, width) for states in (query, key, value))
        out, gradient = (_rows(states.transpose(1, 2), width) for states in (out, gradient))
        sums: list[Tensor | None] = [None, None, None]
        for call in _calls(query, segments, rule):
            where = (call.queries, call.keys, call.keys)
            its_q, its_k, its_v = (_chosen(states, places) for states, places in zip((q, k, v), where, strict=True))
            its_lse = lse if call.queries is None else lse[:, call.queries].contiguous()
            its_gradient, its_out = (_chosen(states, call.queries) for states in (gradient, out))
            gradients = self.backward(its_gradient, its_q, its_k, its_v, its_out, its_lse, call)
            for number, (part, places) in enumerate(zip(gradients, where, strict=True)):
                sums[number] = _added(sums[number], part, places, (q, k, v)[number])
        sinks_grad = None
        if rule.sinks is not None:  # the sink has probability p and value 0: its logit has the gradient -p (grad . out)
            dot = (gradient.to(lse.dtype) * out).sum(-1).T  # (H, N)
            sinks_grad = -((rule.sinks.to(lse.dtype)[:, None] - lse).exp() * dot).sum(1).to(rule.sinks.dtype)
        dq, dk, dv = (
            total[..., : states.shape[3]].transpose(0, 1)[None]
            for total, states in zip(sums, (query, key, value), strict=True)
            if total is not None
        )
        return dq, dk, dv, sinks_grad


def _padded(query: Tensor, value: Tensor) -> int:
    """The width of heads that the functions take."""
    return -(-max(query.shape[3], value.shape[3]) // MULTIPLE) * MULTIPLE


def _rows(states: Tensor, width: int) -> Tensor:
    """From (1, heads, N, D) to (N, heads, width), contiguous, with zeros behind; a copy only where it has to be one."""
    rows, more = states[0].transpose(0, 1), width - states.shape[3]
    return (pad(rows, (0, more)) if more else rows).contiguous()


def _calls(query: Tensor, segments: Segments, rule: AttentionRule) -> tuple[RowsCall, ...]:
    scaling = query.shape[3] ** -0.5 if rule.scaling is None else rule.scaling
    return rows_calls(segments, rule.window, scaling, rule.softcap, query.device)


def _chosen(states: Tensor, places: Tensor | None) -> Tensor:
    return states if places is None else states[places]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: RowsKernel,
        segments: Segments,
        rule: AttentionRule,
    ) -> Tensor:
        out, lse = kernel.attend_forward(query, key, value, segments, rule)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.how = kernel, segments, replace(rule, sinks=None)  # those that are saved count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        kernel, segments, rule = ctx.how
        states, rule = (query, key, value, out, lse), replace(rule, sinks=sinks)
        return *kernel.attend_backward(gradient, states, segments, rule), None, None, None


def _weights(logarithms: Tensor) -> Tensor:
    """Factors (n, heads, 1) of results from their logarithms (heads, n)."""
    return logarithms.exp().T[..., None]


def _added(total: Tensor | None, part: Tensor, places: Tensor | None, like: Tensor) -> Tensor:
    """The sum of gradients (N, heads, width) of all calls so far; a key may be in a call several times."""
    if places is None:
        return part if total is None else total + part
    wide = torch.promote_types(like.dtype, torch.float32)
    spread = torch.zeros_like(like, dtype=wide).index_add_(0, places, part.to(wide))
    return (spread if total is None else spread + total).to(like.dtype)


class FlashKernel(RowsKernel):
    """See `RowsKernel`.

    Attributes:
        third: the functions are those of FlashAttention 3.
    """

    implementation: ClassVar[str] = "rft_packed_fa"

    def __init__(self) -> None:
        package = flash_package()
        assert package is not None, "checked before"
        self.third = package == FLASH_PACKAGES[0]
        self._functions = import_module(package if self.third else f"{package}.flash_attn_interface")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RowsCall) -> tuple[Tensor, Tensor]:
        options = _options(call) | {"causal": call.causal}
        if self.third:
            out, lse, *_ = self._functions._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = self._functions._flash_attn_varlen_forward(q, k, v, dropout_p=0.0, **options)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RowsCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        written = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        options = _options(call) | written | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        tensors = (gradient, q, k, v, out, lse)
        if self.third:
            self._functions._flash_attn_backward(*tensors, is_causal=call.causal, **options)
        else:
            self._functions._flash_attn_varlen_backward(
                *tensors, dropout_p=0.0, causal=call.causal, alibi_slopes=None, **options
            )
        return gradients


def _options(call: RowsCall) -> dict[str, Tensor | int | float]:
    """What all four functions take by the same names; a soft cap of 0 is none."""
    return {
        "cu_seqlens_q": call.query_ends,
        "cu_seqlens_k": call.key_ends,
        "max_seqlen_q": call.longest_query,
        "max_seqlen_k": call.longest_key,
        "softmax_scale": call.scaling,
        "softcap": 0.0 if call.softcap is None else call.softcap,
        **call.seen,
    }


class VarlenKernel(RowsKernel):
    """See `RowsKernel`. torch.nn.attention.varlen calls the same operations."""

    implementation: ClassVar[str] = "rft_packed_rows"

    def refuses(self, needs: AttentionNeeds) -> str | None:
        return "soft-capped logits" if needs.softcap else super().refuses(needs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RowsCall) -> tuple[Tensor, Tensor]:
        assert call.softcap is None
        lengths = (call.query_ends, call.key_ends, call.longest_query, call.longest_key)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, call.causal, False, scale=call.scaling, **call.seen
        )
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RowsCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (call.query_ends, call.key_ends, call.longest_query, call.longest_key)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        unused = torch.empty(0, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, out, lse, *lengths, 0.0, call.causal, seed, unused, scale=call.scaling, **call.seen
        )
        return gradients


class PlannedKernel(VarlenKernel):
    """Allocates what flash-attn and flex attention allocate, for `mode=plan` on a machine that cannot run them."""

    def refuses(self, needs: AttentionNeeds) -> str | None:
        """See `AttentionKernel.refuses`; both kernels have soft caps."""
        return RowsKernel.refuses(self, needs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
        return super().attend(query, key, value, segments, replace(rule, softcap=None))
