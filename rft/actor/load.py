"""Makes the transformers model of an actor: from a path or hub name, or from a config in memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

READING = ContextVar("READING", default=True)


@contextmanager
def without_reading() -> Iterator[None]:
    """In the block no weights are read: a model has the shapes of its path and weights drawn from the seed."""
    token = READING.set(False)
    try:
        yield
    finally:
        READING.reset(token)


def read_config(
    path: str | None, model_config: Mapping[str, Any] | None, vocab_size: int, key: str
) -> PretrainedConfig:
    """The architecture, without any weights.

    Args:
        path: a folder or hub name.
        model_config: a transformers config as a mapping with `model_type`; its vocabulary is the tokenizer's.
        vocab_size: tokens of the tokenizer.
        key: the actor's place in the yaml, for messages.

    Raises:
        ValueError: names the key where the path cannot be read, or neither or both are given.
    """
    if (path is None) == (model_config is None):
        raise ValueError(f"{key}: set one of {key}.path (a folder or hub name) and {key}.model_config (a new model)")
    if path is not None:
        try:
            return AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}.path: no model can be read from {path!r} ({_first_line(error)})") from error
    assert model_config is not None
    options = dict(model_config)
    kind = options.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, vocab_size=vocab_size, **options)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{key}.model_config: transformers refuses it ({_first_line(error)})") from error


def load_model(path: str | None, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The causal language model in float32: weights from the path, or drawn from the seed."""
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    attention = {"attn_implementation": "eager"} if capped else {}  # the others of transformers would leave the cap out
    if path is not None and READING.get():
        return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, **attention)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)


def outline(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of a shape, without memory for its weights: for what names and sizes can say."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that are sharded one by one: the classes that transformers itself never splits."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
