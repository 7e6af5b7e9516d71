"""The test of a kernel on the device of a run, before it is used."""

import torch
from torch import Tensor

from rft.actor.packing.kernels.base import AttentionKernel, AttentionNeeds, AttentionRule
from rft.actor.packing.kernels.sdpa import SdpaKernel
from rft.actor.packing.layout import PackedSegment

TESTED = (PackedSegment(2, 3), PackedSegment(1, 5), PackedSegment(2, 4, prefix=1), PackedSegment(1, 9, prefix=1))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of the largest number


def device_error(
    kernel: AttentionKernel, needs: AttentionNeeds, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a kernel is not to be used on a device, or None; arguments as of `largest_error`."""
    error, limit = largest_error(kernel, needs, device, dtype), TOLERANCE[dtype]
    return None if error <= limit else f"a test on the device is off by {error:.3g} (more than {limit})"


def largest_error(kernel: AttentionKernel, needs: AttentionNeeds, device: torch.device, dtype: torch.dtype) -> float:
    """How far a kernel is from scaled_dot_product_attention in float32, in results and gradients of random rows.

    The rows are of several lengths, with and without a shared prefix and, if the model has windows, with and without a
    window. Each difference is divided by the largest number of its tensor.

    Args:
        needs: of the model whose heads are tested.
    """
    shape = (1, needs.heads, sum(segment.rows * segment.length for segment in TESTED), needs.width)
    generator = torch.Generator().manual_seed(0)
    key_shape = (1, needs.key_heads, *shape[2:])
    sinks = (torch.randn(needs.heads, generator=generator),) if needs.sinks else ()
    inputs = [*(torch.randn(size, generator=generator) for size in (shape, key_shape, key_shape)), *sinks]
    inputs = [tensor.to(device, dtype) for tensor in inputs]
    errors = []
    for window in (None, 4) if needs.windows else (None,):
        results = _results(kernel, inputs, window, needs.softcap)
        expected = _results(SdpaKernel(), [tensor.float() for tensor in inputs], window, needs.softcap)
        errors += [(one - other).abs().max() / other.abs().max() for one, other in zip(results, expected, strict=True)]
    return float(torch.stack(errors).max())


@torch.enable_grad()
def _results(kernel: AttentionKernel, inputs: list[Tensor], window: int | None, capped: bool) -> list[Tensor]:
    """Result and gradients of a kernel, in float32."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    query, key, value, *sinks = leaves
    rule = AttentionRule(None, window, 5.0 if capped else None, sinks[0] if sinks else None)
    out = kernel.attend(query, key, value, TESTED, rule)
    slopes = torch.linspace(-1.0, 1.0, out.numel(), device=out.device).view(out.shape)
    gradients = torch.autograd.grad((out.float() * slopes).sum(), leaves)
    return [out.detach().float(), *(gradient.float() for gradient in gradients)]
