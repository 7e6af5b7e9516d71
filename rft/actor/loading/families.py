"""The config of the part of a model that a run loads, where its folder holds more."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PretrainedConfig,
)

from rft.actor.loading.stored import STORED


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
