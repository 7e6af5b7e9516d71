"""Activation checkpointing of the blocks of a network: their forward is replaced in place; parameter names stay."""

from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def recompute(block: nn.Module, kind: Literal["full", "selective"]) -> None:
    """Frees the activations of a block after its forward and computes them again in the backward pass.

    Args:
        kind: `full` keeps the block's input alone. `selective` also keeps the results of matrix products and of
            attention, which are slow to compute (chosen by operation, as in torchtitan).
    """
    contexts = partial(create_selective_checkpoint_contexts, KEPT) if kind == "selective" else noop_context_fn
    block.forward = partial(  # nothing in a block is random
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
