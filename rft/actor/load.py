"""Makes the transformers model of an actor: from a path or hub name, or from a config in memory."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

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


def load_scorer(path: str | None, config: PretrainedConfig, seed: int, pad: int, key: str) -> PreTrainedModel:
    """The sequence classifier with one label, as `load_model`; its head is drawn from the seed where the path has none.

    Args:
        pad: the padding token, by which a classifier tells where a row ends.
        key: the actor's place in the yaml, for messages.

    Raises:
        ValueError: names the key where transformers has no such classifier of this type.
    """
    config = copy.deepcopy(config)
    config.num_labels, config.get_text_config().pad_token_id = 1, pad
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"{key}.head=score: transformers has no sequence classifier of the type {config.model_type}; choose another"
        )
    return load_model(path, config, seed, AutoModelForSequenceClassification)


def load_model(
    path: str | None, config: PretrainedConfig, seed: int, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The causal language model in float32: weights from the path, or drawn from the seed."""
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    attention = {"attn_implementation": "eager"} if capped else {}  # the others of transformers would leave the cap out
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of a path too: it may lack a head
        if path is not None and READING.get():
            return kind.from_pretrained(path, config=config, dtype=torch.float32, **attention)
        return kind.from_config(config, dtype=torch.float32, **attention)


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
