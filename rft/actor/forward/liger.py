"""Liger's fused kernels (Triton, extra `liger`) in one model: RMSNorm, RoPE and SwiGLU or GeGLU.

Liger replaces classes and functions of a family's module in transformers for the whole process, too. Here they are put
back, so that the other models of the process, of the same family or built later, compute as before.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

# rft computes log-probabilities from hidden states, and the norms of vision towers are no RMSNorms.
OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False, "layer_norm": False}
ACTIVATIONS = {"swiglu": {"silu", "swish"}, "geglu": {"gelu_pytorch_tanh"}}  # that the kernels compute, by option
SHARED = ("torch.nn", "torch.nn.functional")  # modules that Liger may change beside those of transformers


def check_package(key: str) -> None:
    """Raises a ValueError if `liger_kernel` is not installed; it is not imported."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError(
            f'{key}.liger=true needs liger_kernel: pip install "rft[liger]" on a machine with a GPU, or set '
            f"{key}.liger=false"
        )


def check_liger(config: PretrainedConfig, key: str) -> None:
    """Checks that Liger knows the family of a model, and computes its activation.

    Raises:
        ValueError: names the key and the cure.
    """
    text = config.get_text_config()
    patches = [_patch_of(config, key)]
    if text.model_type != config.model_type and text.model_type in _patches():
        patches.append(_patch_of(text, key))
    parameters = {name for patch in patches for name in inspect.signature(patch).parameters}
    activations = {name for option in ACTIVATIONS.keys() & parameters for name in ACTIVATIONS[option]}
    values = text.to_dict()
    name = "hidden_activation" if values.get("hidden_activation") is not None else "hidden_act"
    if activations and values.get(name, next(iter(activations))) not in activations:
        raise ValueError(
            f"{key}.liger=true: the model has {name}={values[name]}, and Liger's kernel computes "
            f"{' or '.join(sorted(activations))}; set {key}.liger=false"
        )


def use_liger(model: PreTrainedModel, key: str, device: torch.device) -> None:
    """Replaces norms, rotations and gated layers of a model by Liger's, in place; see `replace_layers`.

    Args:
        key: of the actor.
        device: where the model will compute.

    Raises:
        ValueError: the device is no GPU, or Liger cannot replace layers of this model.
    """
    if device.type != "cuda":
        raise ValueError(
            f"{key}.liger=true: Liger's kernels are written in Triton and need a GPU, and this process computes on "
            f"{device.type}; set {key}.liger=false"
        )
    check_package(key)
    check_liger(model.config, key)
    replace_layers(model, key)


def replace_layers(model: PreTrainedModel, key: str) -> None:
    """Replaces the forwards of the modules of a model; parameters, their names, and other models stay as they are.

    Raises:
        ValueError: Liger does not know the class of the model.
    """
    patch = _patch_of(model.config, key)
    modules = [name for name in sys.modules if name.startswith("transformers.models.") or name in SHARED]
    before = {name: dict(vars(sys.modules[name])) for name in modules}
    options = {name: value for name, value in OFF.items() if name in inspect.signature(patch).parameters}
    try:
        patch(model=model, **options)
    except (TypeError, AttributeError, NotImplementedError) as error:
        kind = type(model).__name__
        raise ValueError(
            f"{key}.liger=true: Liger cannot replace layers of a {kind} ({error}); set {key}.liger=false"
        ) from error
    finally:
        replaced = {name: _restore(sys.modules[name], variables) for name, variables in before.items()}
    for module in model.modules():
        functions = replaced.get(type(module).__module__)
        if functions and "forward" not in vars(module):
            _bind_functions(module, functions)


def _patch_of(config: PretrainedConfig, key: str) -> Callable[..., None]:
    """Liger's function for a family.

    Raises:
        ValueError: there is none; names the key.
    """
    patches = _patches()
    if config.model_type not in patches:
        raise ValueError(
            f"{key}.liger=true: Liger has no kernels for a model of type {config.model_type}; it knows "
            f"{', '.join(sorted(patches))}; set {key}.liger=false"
        )
    return patches[config.model_type]


def _patches() -> dict[str, Callable[..., None]]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def _restore(module: Any, before: dict[str, Any]) -> dict[str, FunctionType]:
    """Puts back the variables of a Python module; returns the functions that had replaced some of them."""
    changed = {name: value for name, value in vars(module).items() if name in before and value is not before[name]}
    vars(module).update({name: before[name] for name in changed})
    return {name: value for name, value in changed.items() if isinstance(value, FunctionType)}


def _bind_functions(module: nn.Module, functions: dict[str, FunctionType]) -> None:
    """Gives a module a copy of its forward that calls these functions (RoPE) where the class calls its own."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or not functions.keys() & set(forward.__code__.co_names):
        return
    variables = forward.__globals__ | functions
    copied = FunctionType(forward.__code__, variables, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    vars(module)["forward"] = MethodType(copied, module)
