"""One call of scaled_dot_product_attention for all rows of one length; it runs on every device in every dtype.

Nothing is computed between rows, and no mask of (tokens, tokens) exists. A shared prefix is copied behind one another
for the keys of each row.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rft.actor.packing.kernels.base import AttentionKernel, AttentionRule
from rft.actor.packing.layout import PackedSegment, Segments


class SdpaKernel(AttentionKernel):
    """Calls `attend_rows` for all rows of one length."""

    implementation: ClassVar[str] = "rft_packed"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
        tokens = [segment.rows * segment.length for segment in segments]
        queries, keys, values = (states.split(tokens, dim=2) for states in (query, key, value))
        results = []
        for q, k, v, segment in zip(queries, keys, values, segments, strict=True):
            q, k, v = (_apart(states, segment) for states in (q, k, v))
            if segment.prefix is not None:
                k, v = (_behind(parts[segment.prefix], own) for parts, own in ((keys, k), (values, v)))
            states = attend_rows(q, k, v, rule)
            results.append(states.transpose(1, 2).flatten(0, 1)[None])  # (1, rows * length, H, D)
        return torch.cat(results, 1)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Attention (rows, heads, length, width of the values) of each token to itself and to those before it.

    Args:
        q: (rows, heads, length, D), the last tokens of rows.
        k, v: (rows, heads or fewer, at least length, D) of whole rows.
        rule: of the layer.
    """
    length, total = q.shape[2], k.shape[2]
    window = total if rule.window is None else min(rule.window, total)
    mask = causal_window_mask(length, total - length, window, q.device) if length < total or window < total else None
    copies = q.shape[1] // k.shape[1]
    plain = rule.softcap is None and rule.sinks is None
    if copies > 1 and (mask is not None or not plain):  # with a mask CUDA shares heads only where it writes all
        k, v = (states.repeat_interleave(copies, dim=1) for states in (k, v))  # products down
    if plain:
        gqa = k.shape[1] != q.shape[1]
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=rule.scaling, enable_gqa=gqa)
    products = q @ k.mT * (q.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling)
    products = products.to(torch.promote_types(q.dtype, torch.float32))
    if rule.softcap is not None:
        products = rule.softcap * torch.tanh(products / rule.softcap)
    if mask is None:
        mask = causal_window_mask(length, 0, length, q.device)
    products = products.masked_fill(~mask, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.to(products.dtype).view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat((products, sinks), -1)
    return products.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _apart(states: Tensor, segment: PackedSegment) -> Tensor:
    """The rows of a segment by themselves: (1, H, rows * length, D) to (rows, H, length, D)."""
    return states[0].unflatten(1, (segment.rows, segment.length)).transpose(0, 1)


def _behind(prefix: Tensor, own: Tensor) -> Tensor:
    """What rows begin with (1, H, P, D) in front of each of them (rows, H, length, D)."""
    return torch.cat((prefix.expand(len(own), -1, -1, -1), own), 2)


def causal_window_mask(length: int, before: int, window: int, device: torch.device) -> Tensor:
    """Mask (length, before + length) of the keys that a token attends to: itself and fewer than `window` before it."""
    keys = torch.arange(before + length, device=device)
    tokens = keys[before:, None]
    return (keys <= tokens) & (keys > tokens - window)  # bools alone: a difference takes eight bytes for each pair
