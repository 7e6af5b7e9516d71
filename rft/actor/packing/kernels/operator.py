"""Attention of packed rows as one operator of torch, into which the compiler does not look.

A compiled block calls it without a graph break. The segments come as a tensor, so rows of other numbers and lengths are
no reason to compile again.
"""

from typing import Any

import torch
from torch import Tensor

from rft.actor.packing.kernels.base import AttentionKernel, AttentionRule
from rft.actor.packing.layout import table_segments

_KERNELS: dict[str, AttentionKernel] = {}  # an operator takes their names


def attend_opaque(
    kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, table: Tensor, rule: AttentionRule
) -> Tensor:
    """`AttentionKernel.attend` of a kernel that `register` knows.

    Args:
        table: `segment_table` of the segments.
    """
    out, _ = _attend(
        query, key, value, rule.sinks, table, kernel.implementation, rule.scaling, rule.window, rule.softcap
    )
    return out


def register(kernel: AttentionKernel) -> None:
    """Lets the operator find a kernel by its implementation."""
    _KERNELS[kernel.implementation] = kernel


@torch.library.custom_op("rft::packed_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: Tensor,
    kernel: str,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    rule = AttentionRule(scaling, window, softcap, sinks)
    out, lse = _KERNELS[kernel].attend_forward(query, key, value, table_segments(table), rule)
    return out.contiguous(), lse.contiguous()


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, table: Tensor, kernel: str, *how: Any
) -> tuple[Tensor, Tensor]:
    heads, tokens = query.shape[1:3]
    kept = tokens if _KERNELS[kernel].keeps_lse else 0
    return value.new_empty(1, tokens, heads, value.shape[3]), query.new_empty(heads, kept, dtype=torch.float32)


@torch.library.custom_op("rft::packed_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    kernel: str,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients (1, N, heads, width) of queries, keys and values, and that of the sinks, empty without any."""
    rule = AttentionRule(scaling, window, softcap, sinks)
    states = (query, key, value, out, lse)
    *gradients, of_sinks = _KERNELS[kernel].attend_backward(gradient, states, table_segments(table), rule)
    dq, dk, dv = (part.transpose(1, 2).contiguous() for part in gradients)
    return dq, dk, dv, query.new_empty(0) if of_sinks is None else of_sinks


@_attend_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (states.new_empty(states.transpose(1, 2).shape) for states in (query, key, value))
    return dq, dk, dv, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, kernel, scaling, window, softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.how = kernel, scaling, window, softcap


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    *gradients, of_sinks = _attend_backward(gradient, *tensors, out, lse, *ctx.how)
    sinks_grad = None if tensors[3] is None else of_sinks
    return *(part.transpose(1, 2) for part in gradients), sinks_grad, *(None,) * 5


_attend.register_autograd(_backward, setup_context=_setup_context)
