"""One decode step of a wave: the newest token of each row goes in, the logits behind it come out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rft.actor.packing.attention import WITHOUT_EFFECT
from rft.rollout.engine.decoding.cuda_graph import CudaGraph
from rft.rollout.engine.kv_cache import can_join, make_static

RECORDED = "cuda"  # the device whose steps are recorded
ATTENTION = "rft_step"  # the name of `step_attention` among transformers' attention functions


class Decoder:
    """Decodes with a cache that grows by one token a step.

    Args:
        model: a causal language model that returns the logits of the last token alone.
        cache: of R rows, behind the prompts of a wave, which end at one place.
        padding: (R,) tokens before each row.
        padded: whether some row has padding.
        deltas: (R, 1) added to the positions of a model that counts them in several dimensions; else None.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, padding: Tensor, padded: bool, deltas: Tensor | None
    ) -> None:
        self.model = model
        self.cache = cache
        self.padding = padding
        self.padded = padded
        self.deltas = deltas
        self._by_step = padded and deltas is None and step_obstacle(model) is None

    def rows_for(self, live: int) -> int:
        """To how many rows a batch with so many live ones is compacted."""
        return live

    def keep(self, rows: Tensor) -> None:
        """Keeps these rows (R',) alone."""
        self.cache.reorder_cache(rows)
        self.padding = self.padding[rows]
        self.deltas = None if self.deltas is None else self.deltas[rows]

    def step(self, tokens: Tensor, length: int) -> Tensor:
        """The logits (R, V) behind new tokens (R,).

        Args:
            length: tokens of a row before the new one, padding included.
        """
        masks: dict[str, Tensor] = {}
        if self.padded or self.deltas is not None:
            positions = (length - self.padding)[:, None]  # (R, 1)
            masks["position_ids"] = positions if self.deltas is None else positions + self.deltas
        if self.padded:
            seen = torch.arange(length + 1, device=tokens.device) >= self.padding[:, None]  # (R, T)
            if self._by_step:
                return self._forward_by_step(tokens, seen, masks["position_ids"])
            masks["attention_mask"] = seen
        return self._forward(tokens, **masks)

    def _forward_by_step(self, tokens: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        """The logits (R, V) of a model whose layers attend by `step_attention` where `seen` (R, T) is true."""
        with _attends_by_step(self.model.config):
            return self._forward(tokens, attention_mask=seen[:, None, None], position_ids=positions)

    def _forward(self, tokens: Tensor, **masks: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens[:, None], "past_key_values": self.cache, "use_cache": True}
        logits: Tensor = self.model(**inputs, **masks).logits[:, -1]
        return logits


class StaticDecoder(Decoder):
    """Decodes in steps of fixed shapes, which a GPU replays as a CUDA graph.

    A graph holds the addresses of the weights and of the cache. It belongs to one wave, in which no weight is replaced.
    Another one is recorded when rows are compacted, to a power of two, and when the cache grows, by one half.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, padding: Tensor) -> None:
        super().__init__(model, cache, padding, padded=True, deltas=None)
        self._place = torch.zeros(1, dtype=torch.int64, device=padding.device)
        self._graph: CudaGraph | None = None
        self._layers = make_static(cache, self._place)

    def rows_for(self, live: int) -> int:
        """The next power of two, so that few graphs are recorded."""
        return 1 << (live - 1).bit_length()

    def keep(self, rows: Tensor) -> None:
        self._graph = None
        super().keep(rows)

    def step(self, tokens: Tensor, length: int) -> Tensor:
        """See `Decoder.step`. On a GPU the next step overwrites the logits."""
        if length == self._layers[0].capacity:
            self._graph = None
            for layer in self._layers:
                layer.grow()
        self._place.fill_(length)
        if tokens.device.type != RECORDED:
            return self._static_step(tokens)
        if self._graph is None:
            self._graph = CudaGraph(self._static_step, tokens, type(self.model).__name__)
        return self._graph.replay(tokens)

    def _static_step(self, tokens: Tensor) -> Tensor:
        """The logits (R, V) behind the tokens (R,) at `_place`. Nothing else is an input, and no number is read."""
        columns = torch.arange(self._layers[0].capacity, device=tokens.device)
        seen = (columns >= self.padding[:, None]) & (columns <= self._place)  # (R, T)
        return self._forward_by_step(tokens, seen, (self._place - self.padding)[:, None])


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
def _attends_by_step(config: PreTrainedConfig) -> Iterator[None]:
    """The layers of the model with this config attend by `step_attention` in the block."""
    text = config.get_text_config()
    before = text._attn_implementation
    text._attn_implementation = ATTENTION
    try:
        yield
    finally:
        text._attn_implementation = before
