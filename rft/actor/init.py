"""Makes the transformers model of an actor: from a path or hub name, or from a config in memory."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

READING = ContextVar("READING", default=True)


class Classifier(NamedTuple):
    """What a model that gives scores is for transformers.

    Attributes:
        kind: its auto class.
        types: the configs that have one.
        labels: how many.
        title: what it is called, in messages.
    """

    kind: Any
    types: Any
    labels: int
    title: str


CLASSIFIERS = {  # by the head of the actor
    "score": Classifier(
        AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, 1, "sequence classifier"
    ),
    "step": Classifier(AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, 2, "token classifier"),
}


@contextmanager
def init_without_loading() -> Iterator[None]:
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


def load_scorer(
    path: str | None, config: PretrainedConfig, seed: int, pad: int, head: str, key: str
) -> PreTrainedModel:
    """A model of `CLASSIFIERS`, as `load_model`; its head is drawn from the seed where the path has none.

    Args:
        pad: the padding token, by which a classifier of sequences tells where a row ends.
        head: which of them.
        key: the actor's place in the yaml, for messages.

    Raises:
        ValueError: names the key where transformers has no such classifier of this type.
    """
    classifier = CLASSIFIERS[head]
    config = copy.deepcopy(config)
    config.num_labels, config.get_text_config().pad_token_id = classifier.labels, pad
    if type(config) not in classifier.types:
        raise ValueError(
            f"{key}.head={head}: transformers has no {classifier.title} of the type {config.model_type}; choose another"
        )
    return load_model(path, config, seed, classifier.kind)


def check_classifier(config: PretrainedConfig, head: str, where: str) -> None:
    """Looks whether a model is one of `CLASSIFIERS` already, so that its head need not be drawn.

    Args:
        config: of the model.
        head: which of them.
        where: what names the model, for messages.

    Raises:
        ValueError: it is another kind of model.
    """
    classifier, kinds = CLASSIFIERS[head], config.architectures or []
    ending = classifier.kind.__name__.removeprefix("AutoModel")
    if config.num_labels != classifier.labels or not any(kind.endswith(ending) for kind in kinds):
        raise ValueError(
            f"{where}: {', '.join(kinds) or 'a model'} with {config.num_labels} labels is no {classifier.title} with "
            f"{classifier.labels}; a run with actor.head={head} trains one and leaves it in its checkpoints"
        )


def load_model(
    path: str | None, config: PretrainedConfig, seed: int, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The causal language model in float32: weights from the path, or drawn from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of a path too: it may lack a head
        if path is not None and READING.get():
            return kind.from_pretrained(path, config=config, dtype=torch.float32, **attention(config))
        return kind.from_config(config, dtype=torch.float32, **attention(config))


def attention(config: PretrainedConfig) -> dict[str, str]:
    """Options of loading a model: where it caps logits of attention, all but one way to compute it leave that out."""
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    return {"attn_implementation": "eager"} if capped else {}


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of a shape, without memory for its weights: for what names and sizes can say."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that are sharded one by one: the classes that transformers itself never splits."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
