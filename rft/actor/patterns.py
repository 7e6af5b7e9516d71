"""The parts of a model that options name by patterns over the names of its state dict: those that do not train, those
with another learning rate. Messages name the yaml key and the cure.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import meta_model
from rft.actor.options import LIGER, ActorOptions
from rft.errors import did_you_mean
from rft.imports import import_part


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Takes every parameter that a pattern matches out of training; a tied one goes by each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def lr_factors(
    parameters: Iterable[tuple[str, nn.Parameter]], factors: Mapping[str, float]
) -> dict[nn.Parameter, float]:
    """The factor of the learning rate of each parameter that a pattern matches: that of the first such pattern.

    Args:
        parameters: names and parameters of a model; a tied one goes by each of its names.
        factors: by pattern.
    """
    factor_of: dict[nn.Parameter, float] = {}
    named = list(parameters)
    for pattern, factor in factors.items():
        for name, parameter in named:
            if fnmatchcase(name, pattern):
                factor_of.setdefault(parameter, factor)
    return factor_of


def check_parts(
    config: PretrainedConfig, options: ActorOptions, factors: Mapping[str, Mapping[str, float]], key: str
) -> None:
    """Looks for the parameters that the patterns name in a model without weights, and asks whether Liger knows it.

    Args:
        options: of the actor with this key.
        factors: `lr_factors` of its optimizers, by their keys.

    Raises:
        ValueError: a pattern matches no parameter (one of `lr_factors` no parameter that trains), or all of a
            language model's are frozen; or Liger has no kernels for the model.
    """
    if options.liger:
        import_part(LIGER, "check_liger", f"{key}.liger=true")(config, key)
    model, frozen, lora = meta_model(config), options.frozen, options.lora
    part = model if options.head == "lm" else model.base_model
    names = _trained(model, part)
    for number, pattern in enumerate(frozen):
        _check_matches(pattern, names, f"{key}.frozen[{number}]")
    freeze(model, frozen)
    names = _trained(model, part)
    if options.head == "lm" and not names:
        raise ValueError(f"{key}.frozen={list(frozen)}: nothing is left to train; take a pattern out")
    if lora is not None:
        names = lora.part("adapter_names", key)(lora, model, key)
    for optimizer, patterns in factors.items():
        for pattern in patterns:
            _check_matches(pattern, names, f"{optimizer}.lr_factors")


def _trained(model: PreTrainedModel, part: nn.Module) -> list[str]:
    """The names of the parameters of a part that train, as the whole model calls them."""
    held = {id(parameter) for parameter in part.parameters() if parameter.requires_grad}
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in held]


def _check_matches(pattern: str, names: list[str], key: str) -> None:
    if not matching(names, pattern):
        examples = f" (the first: {names[0]}, the last: {names[-1]})" if names else ""
        raise ValueError(
            f"{key}={pattern!r}: matches none of the {len(names)} parameters{examples}{did_you_mean(pattern, names)}"
        )
