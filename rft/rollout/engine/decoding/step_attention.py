"""Attention of decode steps, in which each row has one new token, without copies of keys and values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rft.actor.packing.attention import WITHOUT_EFFECT
from rft.rollout.engine.kv_cache import can_join

ATTENTION = "rft_step"  # the name of `step_attention` among transformers' attention functions


def step_obstacle(model: PreTrainedModel) -> str | None:
    """Why the layers of a model cannot attend by `step_attention`; None if they can."""
    kind = model.config.model_type
    if not can_join(model.config):
        return f"a {kind} has layers that do not attend to all tokens (sliding, linear or recurrent ones)"
    if not model._supports_attention_backend:
        return f"a {kind} has an attention of its own"
    if (implementation := model.config.get_text_config()._attn_implementation) != "sdpa":
        return f"a {kind} computes its attention by {implementation!r}, not by 'sdpa'"
    return None


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token a row, in the signature of transformers' attention functions.

    Heads of queries with one head of keys become queries of that head. With a mask transformers would copy keys and
    values for each of them.

    Args:
        query: (R, heads, 1, width); key, value: (R, fewer heads, T, width).
        attention_mask: (R, 1, 1, T), true where a row sees a key.

    Returns:
        (R, 1, heads, width), and no attention weights. Where the model asks for something else, or has a mask for each
        head, transformers computes them.
    """
    asked = {name for name, given in others.items() if given is not None and given is not False}
    if asked - WITHOUT_EFFECT - {"is_causal"} or attention_mask.shape[1] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    grouped = query.squeeze(2).unflatten(1, (key.shape[1], -1))  # (R, heads of keys, queries of each, width)
    states = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return states.flatten(1, 2).unsqueeze(1), None


AttentionInterface.register(ATTENTION, step_attention)


@contextmanager
def attends_by_step(config: PreTrainedConfig) -> Iterator[None]:
    """The layers of the model with this config attend by `step_attention` in the block."""
    text = config.get_text_config()
    before = text._attn_implementation
    text._attn_implementation = ATTENTION
    try:
        yield
    finally:
        text._attn_implementation = before
