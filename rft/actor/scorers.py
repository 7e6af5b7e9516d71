"""Models that score: classifiers of transformers, their heads, and those that its tables lack for models with media."""

import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from rft.actor.forward.backbone import run_backbone
from rft.actor.heads import ForwardInputs, Network, linear
from rft.actor.init import own_class
from rft.actor.score_moments import forget_moments


def score_network(model: PreTrainedModel, head: str, key: str) -> Network:
    """The network of a head that scores. Raises as `check_scorer`."""
    check_scorer(model, key)
    return ScoreNetwork(model) if head == "score" else StepNetwork(model)


class ScoreNetwork(Network):
    """A sequence classifier of transformers with one label. Column: `score`, one number a row, from its last token.

    As in transformers, this is the last token that is not the padding token.
    """

    def columns(self, inputs: ForwardInputs, outputs: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """Computes `score`: the score of a row at its last selected token; a row without one has no score."""
        tokens, select, layout = inputs.tokens, inputs.select, inputs.layout
        assert layout is None or layout.shard is None, "each rank reads the last tokens of its own rows"
        states, place = run_backbone(self.model.base_model, tokens, layout, inputs.media)
        rows, columns = select.any(1), torch.arange(select.shape[1], device=select.device)
        pad = self.model.config.get_text_config().pad_token_id
        real = tokens["attention_mask"].bool() & (tokens["input_ids"] != pad)
        last = (columns * real).argmax(1)  # (B,)
        scores = linear(self.model.score, states[place.gather(1, last[:, None])[:, 0]])[:, 0]  # (B,)
        where = (columns == (columns * select).argmax(1, keepdim=True)) & rows[:, None]
        return {"score": torch.where(where, scores[:, None], 0.0)}


class StepNetwork(Network):
    """A token classifier of transformers with two labels, bad and good. Column: `score`, the logit of good.

    The score of a token is computed from its own hidden state, not from that of the token before.
    """

    def columns(self, inputs: ForwardInputs, outputs: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        layout = inputs.layout
        assert layout is None or layout.shard is None, "each rank reads the tokens of its own rows"
        states, place = run_backbone(self.model.base_model, inputs.tokens, layout, inputs.media)
        bad, good = linear(self.model.score, states[place[:, 1:].flatten()[inputs.chosen]]).unbind(1)
        return {"score": inputs.aligned(good - bad)}


def check_scorer(model: PreTrainedModel, key: str) -> None:
    """Checks that the score of a classifier is a linear function of a token's hidden state.

    Raises:
        ValueError: it is not; names the key and the architecture.
    """
    children = {name: child for name, child in model.named_children() if name != "dropout"}  # dropout is off
    if set(children) != {model.base_model_prefix, "score"} or not isinstance(children["score"], nn.Linear):
        raise ValueError(
            f"{key}: {type(model).__name__} does not compute its score from a token by one linear layer; choose a "
            "causal language model such as a qwen3 or a llama"
        )


class Classifier(NamedTuple):
    """The transformers classes of a model that computes scores.

    Attributes:
        kind: the auto class.
        types: the config classes that have such a model.
        labels: number of labels.
        title: what messages call the model.
        generic: makes the class of a model that takes media, where transformers has none.
    """

    kind: Any
    types: Any
    labels: int
    title: str
    generic: type

    def class_of(self, config: PretrainedConfig) -> Any:
        """The class that loads the model; None where there is no such classifier."""
        kind: Any = type(config)
        if kind in self.types or own_class(config, self.kind):
            return self.kind
        return media_classifier(kind, self.generic)


CLASSIFIERS = {  # by the head of the actor
    "score": Classifier(
        AutoModelForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        1,
        "sequence classifier",
        GenericForSequenceClassification,
    ),
    "step": Classifier(
        AutoModelForTokenClassification,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        2,
        "token classifier",
        GenericForTokenClassification,
    ),
}


def classifier(config: PretrainedConfig, pad: int, head: str, key: str) -> tuple[PretrainedConfig, Any]:
    """The config of a model with the head of a classifier, and the class that loads it.

    Args:
        config: of the model, which is not changed.
        pad: id of the padding token.
        head: the key in `CLASSIFIERS`.
        key: the yaml key of the actor, for messages.

    Raises:
        ValueError: transformers has no such classifier for this model type.
    """
    chosen, config = CLASSIFIERS[head], copy.deepcopy(config)
    forget_moments(config)
    config.num_labels, config.get_text_config().pad_token_id = chosen.labels, pad
    if (kind := chosen.class_of(config)) is None:
        raise ValueError(
            f"{key}.head={head}: transformers has no {chosen.title} of the type {config.model_type}; choose "
            "another model"
        )
    return config, kind


def check_classifier(config: PretrainedConfig, head: str, where: str) -> None:
    """Checks that a saved model has the head of a classifier.

    Args:
        config: the config of the model.
        head: the key in `CLASSIFIERS`.
        where: the yaml key and path of the model, for messages.

    Raises:
        ValueError: the model is of another kind.
    """
    classifier, kinds = CLASSIFIERS[head], config.architectures or []
    ending = classifier.kind.__name__.removeprefix("AutoModel")
    if config.num_labels != classifier.labels or not any(kind.endswith(ending) for kind in kinds):
        raise ValueError(
            f"{where}: {', '.join(kinds) or 'a model'} with {config.num_labels} labels is no {classifier.title} with "
            f"{classifier.labels}; a run with actor.head={head} trains one and saves it in its checkpoints"
        )


@cache
def media_classifier(config: type[PretrainedConfig], head: type) -> type[PreTrainedModel] | None:
    """The class that transformers would have: its generic head on the backbone of the family.

    It reads the files of the family's language model, and its own. The auto classes of transformers do not know it.

    Args:
        config: the config class of the model.
        head: the generic class of transformers, `GenericFor<Task>`.

    Returns:
        The class `<Family>For<Task>`, or None for a family that has no backbone apart from its language model.
    """
    mappings: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_MAPPING
    if any(config not in mapping for mapping in mappings):
        return None
    language = MODEL_FOR_MULTIMODAL_LM_MAPPING[config]
    *_, family, _ = (base for base in language.__mro__ if issubclass(base, PreTrainedModel))  # the last is that itself
    name = f"{language.__name__.rpartition('For')[0]}{head.__name__.removeprefix('Generic')}"
    attributes = {"__module__": language.__module__, "from_config": classmethod(_from_config)}
    made: type[PreTrainedModel] = type(name, (head, family), attributes)
    if (renamed := get_checkpoint_conversion_mapping(language.__name__)) is not None:  # else it is that of the family
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return made


def _from_config(cls: Any, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """As that of auto classes; there is no other code that might be trusted."""
    options.pop("trust_remote_code", None)
    model: PreTrainedModel = cls._from_config(config, **options)
    return model
