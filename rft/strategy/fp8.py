"""Matrix products in float8 in the linear layers of blocks that train, by torchao (extra `fp8`).

A layer casts its input, its weight and, in the backward pass, the gradient of its output to float8, each with a scale
that is computed from the numbers at hand, and multiplies them on the tensor cores of the GPU. Weights, their names,
gradients and the optimizer stay as they are: float32 masters that FSDP gathers in bfloat16.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from rft.distributed import device_kind, missing_capability

Fp8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]  # torchao's names of its recipes
MULTIPLE = 16  # the kernels need matrices whose sizes are multiples of it
CAPABILITY = (8, 9)  # of the first GPUs with float8 (Ada, then Hopper)
ROUTERS = {"router", "gate"}  # what models of transformers call the layers that choose experts


def obstacle(device: str) -> str | None:
    """Why a device has no float8, or None. `mode=plan` may name a device that this machine does not have.

    Args:
        device: its type, or auto: CUDA where there is a device.
    """
    if device_kind(device) == "cpu":
        return f"float8 needs a GPU, and with strategy.device={device} this machine computes on its CPU"
    missing = missing_capability(CAPABILITY)
    return None if missing is None else f"float8 needs {missing}"


def check_layers(backbone: nn.Module, recipe: Fp8, where: str) -> None:
    """Checks that a model, if it trains, has layers that can compute in float8.

    Args:
        backbone: maybe on the meta device; parameters that train require a gradient.
        where: the model's place in the yaml.

    Raises:
        ValueError: there is none; names the key.
    """
    trains = any(parameter.requires_grad for parameter in backbone.parameters())
    if trains and not any(can_convert(module, name) for name, module in backbone.named_modules()):
        raise ValueError(
            f"strategy.fp8={recipe}: {type(backbone).__name__} of {where} has no linear layer (nn.Linear) that trains "
            f"and whose two sizes are multiples of {MULTIPLE}; set strategy.fp8=null"
        )


def can_convert(module: nn.Module, name: str) -> bool:
    """Whether a part of a model is a linear layer that float8 is for: it trains, has fitting sizes and is no router.

    Args:
        name: in the model, or in its block.
    """
    if type(module) is not nn.Linear or not module.weight.requires_grad:  # a subclass has a forward of its own
        return False
    fits = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
    return fits and not ROUTERS & set(name.split("."))


def use_fp8(block: nn.Module, recipe: Fp8) -> None:
    """Replaces the linear layers of a block by torchao's, in place; parameters stay the same objects.

    `tensorwise` has one scale for each of the matrices, so results depend on the tokens of a micro-batch; `rowwise` one
    for each token and each row of a weight. `rowwise_with_gw_hp` computes the gradient of the weight in bfloat16.

    Args:
        block: not sharded, not compiled yet.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    made: Callable[[str], Any] = Float8LinearConfig.from_recipe_name
    # the gradient of a weight sums over the tokens of a micro-batch, whose number need not be a multiple of 16
    config = replace(made(recipe), pad_inner_dim=True)
    convert_to_float8_training(block, config=config, module_filter_fn=can_convert)
