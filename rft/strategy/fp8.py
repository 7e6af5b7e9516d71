"""Matrix products in float8 in the linear layers of blocks that train, by torchao (extra `fp8`).

A layer casts its input, its weight and, in the backward pass, the gradient of its output to float8, each with a scale
that is computed from the numbers at hand, and multiplies them on the tensor cores of the GPU. Weights, their names,
gradients and the optimizer stay as they are: float32 masters that FSDP gathers in bfloat16.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from rft.distributed import device_kind, missing_capability
from rft.strategy.base import ModelFacts

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


def fp8_errors(
    recipe: str, device: str, dtype: str, tensor_parallel: int, models: Mapping[str, ModelFacts]
) -> Iterator[str]:
    """A message for every reason why the layers cannot compute in float8, with the key and the cure.

    Args:
        recipe, device, dtype, tensor_parallel: options of the strategy.
        models: by their yaml keys.
    """
    key, undo = f"strategy.fp8={recipe}", "strategy.fp8=null"
    if (reason := obstacle(device)) is not None:
        yield f"{key}: {reason}; set {undo}"
    if importlib.util.find_spec("torchao") is None:
        yield f'{key} needs torchao: pip install "rft[fp8]", or set {undo}'
    if dtype != "bfloat16":
        yield (
            f"{key}: the rest of the model computes in bfloat16 then, and strategy.dtype is {dtype}; set "
            f"strategy=bf16 (strategy.dtype=bfloat16), or {undo}"
        )
    if tensor_parallel > 1:
        yield (
            f"{key}: the layers that strategy.tensor_parallel={tensor_parallel} splits have a forward of "
            f"their own; set strategy.tensor_parallel=1, or {undo}"
        )
    for name, facts in models.items():
        if facts.lora and facts.optimizers:
            yield (
                f"{key}: with {name}.lora the layers do not train, and float8 is for layers that do; set "
                f"{name}.lora=null, or {undo}"
            )
        if facts.media and facts.optimizers:
            yield (
                f"{key}: the {name} takes media (actor.processor), and the towers that read them would compute in "
                f"float8 too; set {undo}"
            )


def check_layers(backbone: nn.Module, recipe: str, where: str) -> None:
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


def use_fp8(block: nn.Module, recipe: str) -> None:
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
