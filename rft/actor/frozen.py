"""Parts of a model that do not train, by patterns over the names of its state dict."""

from collections.abc import Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from typing import Literal

from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import meta_model
from rft.registry import did_you_mean


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Takes every parameter that a pattern matches out of training; a tied one goes by each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def check_frozen(config: PretrainedConfig, head: Literal["lm", "value"], patterns: Sequence[str], key: str) -> None:
    """Looks for the parameters in a model without weights.

    Raises:
        ValueError: a pattern matches no parameter, or all of a language model's are frozen.
    """
    model = meta_model(config)
    part = model if head == "lm" else model.base_model
    held = {id(parameter) for parameter in part.parameters()}
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in held]
    for number, pattern in enumerate(patterns):
        if not matching(names, pattern):
            raise ValueError(
                f"{key}.frozen[{number}]={pattern!r}: matches none of the {len(names)} parameters (the first: "
                f"{names[0]}, the last: {names[-1]}){did_you_mean(pattern, names)}"
            )
    freeze(model, patterns)
    if head == "lm" and not any(parameter.requires_grad for parameter in part.parameters()):
        raise ValueError(f"{key}.frozen={list(patterns)}: nothing is left to train; take a pattern out")
