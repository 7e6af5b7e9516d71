"""AdamW with 8-bit moments: block-wise dynamic quantization (arXiv 2110.02861).

A block is 256 adjacent numbers of one row, scaled by its largest absolute value. Sharding never splits a row, so codes
and scales are sharded like the weights, and the state does not depend on the number of ranks. The weights are updated
with the moments before they are quantized again.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rft.actor.optim.optimizer import Rule
from rft.strategy.gather import to_local

BLOCK = 256
CODES = ("exp_avg", "exp_avg_sq")  # in the state, each with its scales
NUMBERS_AT_ONCE = 2**22  # moments that are dequantized to float32 at a time


def takes(parameter: nn.Parameter) -> bool:
    """True if the moments of a parameter are quantized; those of vectors are small and stay float32."""
    return parameter.dim() >= 2


def step(parameters: Iterable[nn.Parameter], states: Iterable[dict[str, Any]], group: dict[str, Any]) -> None:
    """Updates parameters that have a gradient. State: codes and scales of both moments."""
    beta1, beta2 = group["betas"]
    for parameter, state in zip(parameters, states, strict=True):
        if "exp_avg" not in state:
            for name in CODES:
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{name}_scale"] = torch.zeros_like(parameter[..., ::BLOCK])
        step_size = group["lr"] / (1 - beta1 ** state["step"])
        correction = (1 - beta2 ** state["step"]).sqrt()
        names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        tensors = (parameter, parameter.grad, *(state[name] for name in names))
        rows = max(1, NUMBERS_AT_ONCE // parameter.shape[1:].numel())
        for weight, grad, m, m_scale, v, v_scale in zip(*(to_local(t).split(rows) for t in tensors), strict=True):
            mean = numbers(m, m_scale, signed=True).lerp_(grad, 1 - beta1)
            square = numbers(v, v_scale, signed=False).lerp_(grad.square(), 1 - beta2)
            round_to(m, m_scale, mean, signed=True)
            round_to(v, v_scale, square, signed=False)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(mean.mul_(step_size).div_(square.sqrt_().div_(correction).add_(group["eps"])))


RULE = Rule(takes, step, codes=CODES)


def numbers(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Dequantizes codes to numbers (..., N) float32.

    Args:
        codes: (..., N) uint8.
        scales: (..., blocks).
        signed: selects the signed or the unsigned code book.
    """
    shares = code_book(signed, codes.device).index_select(0, codes.int().flatten()).view(codes.shape)
    return shares * scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]


def round_to(codes: Tensor, scales: Tensor, values: Tensor, signed: bool) -> None:
    """Quantizes values (..., N): writes the nearest codes and the scales of their blocks."""
    width = values.shape[-1]
    blocks = nn.functional.pad(values, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales.copy_(blocks.abs().amax(-1))
    shares = blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)[..., None]
    bits = shares.half().view(torch.int16).int() + 2**15  # indexes a table of 65,536 codes: faster than a search
    nearest = nearest_codes(signed, codes.device).index_select(0, bits.flatten())
    codes.copy_(nearest.view(*codes.shape[:-1], -1)[..., :width])


@functools.cache
def code_book(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers of the dynamic tree data type (arXiv 2110.02861, section 2.1), sorted, over seven decades."""
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent if signed else exponent + 1) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.to(device)


@functools.cache
def nearest_codes(signed: bool, device: torch.device) -> Tensor:
    """The nearest code of every float16 (65,536,) uint8; the index is its bits as int16 plus 2^15."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    book = code_book(signed, torch.device("cpu"))
    return torch.bucketize(values, (book[1:] + book[:-1]) / 2).to(device, torch.uint8)
