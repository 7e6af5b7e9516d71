"""A decode step of models that are built like Llama, in less than half of the operations.

On a CPU the step of a small model, or of few rows, takes about as long as it has operations. transformers computes a
block in about 80; here one product has the queries, keys and values, one has both halves of the MLP, queries and keys
are rotated together, and residuals are added by the products.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import Cache, PreTrainedModel

from rft.rollout.engine.decoding.column_weights import ColumnWeights, biases
from rft.rollout.engine.decoding.step_attention import step_obstacle
from rft.rollout.engine.kv_cache import GrowingLayer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # types of models whose blocks compute what `FusedBlock` does


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedStep` computes what the model does."""
    kind = model.config.model_type
    own = type(model).__module__ == f"transformers.models.{kind}.modeling_{kind}"
    return kind in FAMILIES and own and step_obstacle(model) is None


def linear_groups(model: PreTrainedModel) -> list[Sequence[nn.Linear]]:
    """All linear layers of a model, for `ColumnWeights`; those that a fused step computes together are a group."""
    groups: list[Sequence[nn.Linear]] = []
    if can_fuse(model):
        for block in model.base_model.layers:
            attention, mlp = block.self_attn, block.mlp
            groups += [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
    grouped = {layer for group in groups for layer in group}
    alone = [module for module in model.modules() if isinstance(module, nn.Linear) and module not in grouped]
    return [*groups, *((layer,) for layer in alone)]


class FusedBlock:
    """A block of the model.

    Args:
        block: of transformers.
        weights: of the model's linear layers, in the groups of `linear_groups`.
    """

    def __init__(self, block: Any, weights: ColumnWeights) -> None:
        attention, mlp = block.self_attn, block.mlp
        width = attention.head_dim
        self.width = width
        self.queries, self.keys = (len(layer.weight) // width for layer in (attention.q_proj, attention.k_proj))
        self.scaling = attention.scaling
        self.qkv = weights.joined(attention.q_proj)  # (D, heads of queries, keys and values)
        self.qkv_bias = biases(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.out_bias = weights.joined(attention.o_proj), attention.o_proj.bias
        self.gate_up, self.gate_up_bias = weights.joined(mlp.gate_proj), biases(mlp.gate_proj, mlp.up_proj)
        self.down, self.down_bias = weights.joined(mlp.down_proj), mlp.down_proj.bias
        self.activation = mlp.act_fn
        self.first_norm, self.second_norm = block.input_layernorm, block.post_attention_layernorm
        self.head_norm: Tensor | None = None  # (heads of queries and keys, width)
        if "q_norm" in dict(attention.named_children()):
            norms = [attention.q_norm.weight] * self.queries + [attention.k_norm.weight] * self.keys
            self.head_norm = torch.stack(norms)

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, cache: GrowingLayer, mask: Tensor | None) -> Tensor:
        """The states (R, D) behind the block; the others as in `FusedStep`."""
        heads = linear(norm(states, self.first_norm), self.qkv, self.qkv_bias).unflatten(1, (-1, self.width))
        rotated, values = heads.split([self.queries + self.keys, self.keys], 1)  # (R, heads, width)
        if self.head_norm is not None:
            rotated = rms_norm(rotated, (self.width,), None, self.first_norm.variance_epsilon) * self.head_norm
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.width // 2, -1), sin)
        queries, keys = rotated.split([self.queries, self.keys], 1)
        seen = cache.update(keys[:, :, None], values[:, :, None])  # keys and values (R, heads, T, width)
        queries = queries.unflatten(1, (self.keys, -1))  # (R, heads of keys, queries of each, width)
        attended = scaled_dot_product_attention(queries, *seen, attn_mask=mask, scale=self.scaling)
        states = add_linear(states, attended.flatten(1), self.out, self.out_bias)
        gate, up = linear(norm(states, self.second_norm), self.gate_up, self.gate_up_bias).chunk(2, 1)
        return add_linear(states, self.activation(gate) * up, self.down, self.down_bias)


class FusedStep:
    """The forward of one new token a row. It holds the weights, so it lives no longer than they do.

    Args:
        model: one that `can_fuse`.
        weights: of its linear layers.
    """

    def __init__(self, model: PreTrainedModel, weights: ColumnWeights) -> None:
        self._model = model
        self._blocks = [FusedBlock(block, weights) for block in model.base_model.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, seen: Tensor | None) -> Tensor:
        """Appends the tokens to the cache, and returns the logits (R, V) behind them.

        Args:
            tokens: (R,).
            positions: (R, 1), or (1, 1) where all rows have the same.
            cache: growing, of R rows.
            seen: (R, T), true where a row sees a key; None: everywhere.
        """
        states = self._model.get_input_embeddings()(tokens[:, None])  # (R, 1, D)
        base = self._model.base_model
        cos, sin = base.rotary_emb(states, positions)  # (R, 1, width)
        lower, upper = sin.chunk(2, -1)
        sin = torch.cat([-lower, upper], -1)  # the halves of a head are exchanged, and the first one is negated
        mask = None if seen is None else torch.where(seen, 0.0, -torch.inf).to(states.dtype)[:, None, None]
        states = states.squeeze(1)
        for block, layer in zip(self._blocks, cache.layers, strict=True):
            states = block(states, cos, sin, layer, mask)
        logits: Tensor = self._model.get_output_embeddings()(norm(states, base.norm)[:, None])[:, -1]
        return logits


def norm(states: Tensor, module: Any) -> Tensor:
    """What a module of transformers' Llama computes, in one call."""
    return rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)


def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs (R, out) of states (R, in), a weight (in, out) and a bias (out,)."""
    return states @ weight if bias is None else torch.addmm(bias, states, weight)


def add_linear(residual: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs of `linear` and a residual (R, out)."""
    return torch.addmm(residual if bias is None else residual + bias, states, weight)
