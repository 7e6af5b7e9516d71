"""Attention over packed rows: every run of tokens sees itself causally, and the run that its row begins with.

It stands in the place of transformers' attention functions, so it serves every model that calls those. One call of
scaled_dot_product_attention a run: nothing is computed between rows, and no mask of (tokens, tokens) exists.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from rft.actor.layout import Layout, Segment, pack

NAME = "rft_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the signature of transformers' attention functions.

    Args:
        query: (1, heads, N, width) of the packed sequence; key, value: of as many or fewer heads.
        layout: what the rows are.
        scaling: of the products, or None for 1 / sqrt(width).
        sliding_window: a token sees at most so many, itself included; None for all.

    Returns:
        (1, N, heads, width), and no attention weights.
    """
    part = layout.slice
    if part is None:
        return _attend(query, key, value, layout.segments, scaling, sliding_window).transpose(1, 2), None
    copies = part.context.size // math.gcd(key.shape[1], part.context.size)
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))  # every rank needs heads
    query, key, value = (part.context.spread_heads(states, part.counts) for states in (query, key, value))
    states = _attend(query, key, value, layout.segments, scaling, sliding_window)
    return part.context.collect_heads(states, part.counts).transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    lengths = [segment.length for segment in segments]
    queries, keys, values = (states.split(lengths, dim=2) for states in (query, key, value))
    results = []
    for q, k, v, segment in zip(queries, keys, values, segments, strict=True):
        if segment.prefix is not None:
            k, v = (torch.cat((parts[segment.prefix], own), 2) for parts, own in ((keys, k), (values, v)))
        before, total = k.shape[2] - segment.length, k.shape[2]
        windowed = sliding_window is not None and sliding_window < total
        mask = (
            seen(segment.length, before, sliding_window if windowed else total, q.device)
            if before or windowed
            else None
        )
        gqa = k.shape[1] != q.shape[1]
        results.append(
            scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
        )
    return torch.cat(results, 2)


def seen(length: int, before: int, window: int, device: torch.device) -> Tensor:
    """Which keys (before + length) each of `length` tokens sees: itself and what is less than `window` behind it."""
    places = torch.arange(before + length, device=device)
    distance = places[before:, None] - places
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)


@torch.no_grad()
def use_packed_attention(model: PreTrainedModel, key: str) -> None:
    """Switches the attention of a causal language model or a backbone, after a look at what it makes of packed rows.

    Raises:
        ValueError: tokens of one row change the states of another, as in models with layers that are not attention.
    """
    model.eval()
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 0, 0]], device=model.device) % model.config.vocab_size
    apart = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    columns = TensorDict({"input_ids": ids, "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}, batch_size=[2])
    rows = TensorDict({"tokens": columns, "group": torch.zeros(2), "response_mask": ids > 0}, batch_size=[2])
    layout = pack(rows, torch.tensor([2, 2])).to(model.device)
    model.config.get_text_config()._attn_implementation = NAME
    try:
        packed = {"input_ids": ids.flatten()[layout.source][None], "position_ids": layout.positions[None]}
        together = model.base_model(**packed, layout=layout, use_cache=False).last_hidden_state[0][layout.place]
        fits = not _other_layers(model) and torch.allclose(
            together[rows["response_mask"]], apart[rows["response_mask"]], atol=1e-3
        )
    except TypeError:  # a model that does not call transformers' attention functions, or takes no positions
        fits = False
    if not fits:
        raise ValueError(
            f"{key}.packing: {type(model).__name__} has layers that would mix packed rows; set {key}.packing=false"
        )


def _other_layers(model: PreTrainedModel) -> set[str]:
    """Kinds of layers that see other tokens than by full or windowed attention."""
    described = model.config.get_text_config().to_dict()
    kinds = set(described.get("layer_types") or ())
    return kinds - {"full_attention", "sliding_attention"}
