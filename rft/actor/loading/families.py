"""What transformers' tables lack for some families: classifiers of models that take media, where it has the language
model alone, and the config of the part of a model that a run loads, where its folder holds more.
"""

from functools import cache
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from rft.actor.loading.stored import STORED


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


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the model that reads media and writes text, where a config is of that and of one that speaks.

    transformers loads such a part from the folder of the whole.
    """
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return config
    text, parts = config.get_text_config(), [vars(config).get(name) for name in config.sub_configs]
    return next((part for part in parts if part and part is not text and part.get_text_config() is text), config)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text part, where transformers has one language model of it and another of the whole."""
    kind: Any = type(config)
    if not (kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING):
        return config
    text: PretrainedConfig = config.get_text_config()
    same = MODEL_FOR_CAUSAL_LM_MAPPING[kind] is MODEL_FOR_MULTIMODAL_LM_MAPPING[kind]
    if same or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    stored = {name: vars(config)[name] for name in STORED if name in vars(config)}
    vars(text).update(stored)  # they say how the files of the whole are read
    return text
