"""FlashAttention 3 (2407.08608) or 2 (2307.08691) of the package flash-attn, the newest that is installed."""

from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from rft.actor.packing.kernels.rows import RowsCall, RowsKernel
from rft.strategy.attention import FLASH_PACKAGES, flash_package


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
        """See `RowsKernel.forward`."""
        options = _options(call) | {"causal": call.causal}
        if self.third:
            out, lse, *_ = self._functions._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = self._functions._flash_attn_varlen_forward(q, k, v, dropout_p=0.0, **options)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RowsCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowsKernel.backward`."""
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
