"""Stand-ins for the weights of a model, for what needs a model before its weights are read. They take no memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def stand_ins(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """In the block, the parameters of a model are others. What becomes frozen there stays so.

    Args:
        make: makes the other tensor, of the same shape, on the CPU.
    """
    replaced = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, parameter in replaced:
        module.register_parameter(name, nn.Parameter(make(parameter), requires_grad=parameter.requires_grad))
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            parameter.requires_grad_(module.get_parameter(name).requires_grad)
            module.register_parameter(name, parameter)


def zeros(parameter: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """One zero, expanded to the shape of a parameter."""
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def random_numbers() -> Callable[[Tensor], Tensor]:
    """A function that makes stand-ins from one vector of random numbers: element (i, j) is number i + j + k of it.

    k grows from one call to the next. Matrices (out, in) have a deviation of 1 / sqrt(in), vectors are near 1. All
    are float32. The experts of a layer are one matrix, which takes memory, once for all layers.
    """
    generator, calls = torch.Generator().manual_seed(0), 0
    numbers, experts = torch.randn(2**12, generator=generator), dict[tuple[int, ...], Tensor]()

    def make(parameter: Tensor) -> Tensor:
        nonlocal numbers, calls
        calls += 1
        shape = tuple(parameter.shape[-2:])
        if parameter.dim() > 2 and shape in experts:
            return experts[shape].expand(parameter.shape)
        while len(numbers) < calls + sum(shape):
            numbers = torch.cat((numbers, torch.randn(len(numbers), generator=generator)))
        vector = numbers[calls : calls + sum(shape)]
        scaled = 1 + 0.1 * vector if parameter.dim() < 2 else vector / shape[-1] ** 0.5
        made = scaled.as_strided(shape, [1] * len(shape))
        if parameter.dim() > 2:
            made = experts[shape] = made.contiguous()  # grouped products take no overlapping rows
        return made.expand(parameter.shape)

    return make
