"""Frozen weights in 4 bits: NF4 with double quantization (QLoRA, arXiv 2305.14314), by bitsandbytes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rft.actor.loading.stored import PackedLayer


class PackedLinear(PackedLayer):
    """A linear layer that dequantizes its weight in the forward pass and again in the backward pass.

    The parameter holds the packed bytes, viewed as the compute dtype: FSDP would cast any other dtype.

    Args:
        layer: the layer to quantize; its bias is kept. With a weight on the meta device, `pack` quantizes it later.
        dtype: the compute dtype.
        device: where the scales stay, which are not sharded (at most half a bit per weight).
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape, self.bytes = layer.weight.shape, (layer.weight.numel() + 1) // 2
        self.state: Any = None
        self._dtype, self._device = dtype, device
        if layer.weight.is_meta:
            packed = torch.empty(-(-self.bytes // dtype.itemsize), dtype=dtype, device="meta")
        else:
            packed = self.pack(layer.weight.detach())
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def pack(self, weight: Tensor) -> Tensor:
        """Quantizes the whole matrix (out, in) and keeps its scales; returns the packed bytes as the compute dtype."""
        from bitsandbytes.functional import quantize_4bit

        # on CPUs bitsandbytes 0.50 mixes up blocks across rows
        numbers = weight.to(self._device, torch.float32).view(1, -1)
        packed, self.state = quantize_4bit(numbers, quant_type="nf4", compress_statistics=True)
        self.state.dtype = self._dtype
        return nn.functional.pad(packed.flatten(), (0, -self.bytes % self._dtype.itemsize)).view(self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return _Product.apply(inputs, self.weight, self.bias, self)

    def unpacked(self, weight: Tensor) -> Tensor:
        """Dequantizes the full packed weight: a matrix (out, in)."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.view(torch.uint8)[: self.bytes, None], self.state).view(self.shape)

    def gathered(self, weight: Tensor) -> Tensor:
        """The dequantized matrix in float32 on every rank. A collective if the packed weight is sharded."""
        if not isinstance(weight, DTensor):
            return self.unpacked(weight).float()
        matrix = self.unpacked(weight.full_tensor()).float()
        return DTensor.from_local(matrix, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: PackedLinear) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.unpacked(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ ctx.layer.unpacked(weight), None, None, None


def quantize(model: nn.Module, names: list[str], dtype: torch.dtype, device: torch.device) -> None:
    """Replaces the named linear layers of a model by quantized ones, in place."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(name, PackedLinear(layer, dtype, device))
