"""Torch's own FlashAttention over rows of any length; it needs no further package."""

from typing import ClassVar

import torch
from torch import Tensor

from rft.actor.packing.kernels.base import AttentionNeeds
from rft.actor.packing.kernels.rows import RowsCall, RowsKernel


class VarlenKernel(RowsKernel):
    """See `RowsKernel`. torch.nn.attention.varlen calls the same operations."""

    implementation: ClassVar[str] = "rft_packed_rows"

    def refuses(self, needs: AttentionNeeds) -> str | None:
        """See `AttentionKernel.refuses`."""
        return "soft-capped logits" if needs.softcap else super().refuses(needs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RowsCall) -> tuple[Tensor, Tensor]:
        """See `RowsKernel.forward`."""
        assert call.softcap is None
        lengths = (call.query_ends, call.key_ends, call.longest_query, call.longest_key)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, call.causal, False, scale=call.scaling, **call.seen
        )
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RowsCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowsKernel.backward`."""
        lengths = (call.query_ends, call.key_ends, call.longest_query, call.longest_key)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        unused = torch.empty(0, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, out, lse, *lengths, 0.0, call.causal, seed, unused, scale=call.scaling, **call.seen
        )
        return gradients
