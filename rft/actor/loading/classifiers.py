"""Classifiers of models that take media, for families of which transformers has the language model alone."""

from functools import cache
from typing import Any

from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping


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
    known: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_MAPPING
    if any(config not in mapping for mapping in known):
        return None
    language = MODEL_FOR_MULTIMODAL_LM_MAPPING[config]
    *_, family, _ = (base for base in language.__mro__ if issubclass(base, PreTrainedModel))  # the last is that itself
    name = f"{language.__name__.rpartition('For')[0]}{head.__name__.removeprefix('Generic')}"
    own = {"__module__": language.__module__, "from_config": classmethod(_from_config)}
    made: type[PreTrainedModel] = type(name, (head, family), own)
    if (renamed := get_checkpoint_conversion_mapping(language.__name__)) is not None:  # else it is that of the family
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return made


def _from_config(cls: Any, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """As that of auto classes; there is no other code that might be trusted."""
    options.pop("trust_remote_code", None)
    model: PreTrainedModel = cls._from_config(config, **options)
    return model
