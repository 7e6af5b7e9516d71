"""Frozen weights in 4 bits: NF4 with scales that are quantized too (QLoRA, 2305.14314), packed by bitsandbytes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class PackedLinear(nn.Module):
    """A linear layer that unpacks its weight when it is used, and again in the backward pass.

    The parameter is the packed bytes, seen as numbers of the dtype that the layer computes in: FSDP would cast others.

    Args:
        layer: what is packed; its bias is taken over.
        dtype: to compute in.
        device: where the parts that are not sharded (half a bit or less a weight) stay.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__()
        numbers = layer.weight.detach().to(device).view(1, -1)  # blocks that cross rows are mixed up by 0.50 on CPUs
        packed, self.state = quantize_4bit(numbers, quant_type="nf4", compress_statistics=True)
        self.state.dtype = dtype
        self.shape, self.bytes = layer.weight.shape, packed.numel()
        packed = nn.functional.pad(packed.flatten(), (0, -self.bytes % dtype.itemsize))
        self.weight = nn.Parameter(packed.view(dtype), requires_grad=False)
        self.bias = layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return _Product.apply(inputs, self.weight, self.bias, self)

    def unpacked(self, weight: Tensor) -> Tensor:
        """The matrix (out, in) that the whole packed weight stands for."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.view(torch.uint8)[: self.bytes, None], self.state).view(self.shape)

    def gathered(self, weight: Tensor) -> Tensor:
        """The matrix in float32 on every rank. A collective where the packed weight is sharded."""
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
    """Replaces linear layers of a model, in place."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(name, PackedLinear(layer, dtype, device))
