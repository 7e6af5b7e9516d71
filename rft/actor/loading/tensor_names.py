"""Names of a model's tensors: what those of its backbone begin with in the whole model, and what published checkpoints
call them, where transformers renames them when it loads a model.

Engines with code of their own for a family are written for the names in published checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key


def name_backbone(model: PreTrainedModel) -> None:
    """Sets the `base_model_prefix` of a text model whose class has that of another model, as that of Llama 4 has."""
    if model.base_model is model and model.get_output_embeddings() is not None:
        parts = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
        if len(parts) == 1:
            model.base_model_prefix = parts[0]


def inner_prefix(model: PreTrainedModel) -> str:
    """What the names of a backbone's tensors begin with in its whole model; nothing if it is no module of its own."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def outer_prefix(model: PreTrainedModel) -> str:
    """What a model with a head puts before the names of this model's tensors, a backbone; nothing for other models."""
    alone = model.base_model is model and model.get_output_embeddings() is None
    return f"{model.base_model_prefix}." if alone else ""


def checkpoint_names(model: PreTrainedModel) -> dict[str, str]:
    """The names in published checkpoints by those in the state dict, for a model that has more than a text part.

    An export of a model that was read from files has the names of those; these here are a function of the class.

    Args:
        model: its weights are not read.

    Returns:
        All names. Nothing for a model of text, and nothing where a checkpoint differs in more than names, as where it
        has the experts of a layer in several tensors: engines know the state dict of those.
    """
    if model.config.get_text_config() is model.config:
        return {}
    # The class of a model and that of its backbone can have the same renaming. Files need the first of them alone;
    # transformers itself reverts both, and writes `language_model.model.model` for one family.
    distinct: dict[Any, WeightTransform] = {}
    for transform in get_model_conversion_mapping(model, add_legacy=False):
        distinct.setdefault((tuple(transform.source_patterns), transform.scope_prefix or ""), transform)
    reverted = [transform.reverse_transform() for transform in reversed(distinct.values())]
    renamings = [transform for transform in reverted if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in reverted if isinstance(transform, WeightConverter)]
    names = {}
    for name in model.state_dict():
        names[name], converted = rename_source_key(name, renamings, converters, reverse=True)
        if converted is not None:
            return {}
    return names


def renamed(tensors: Iterable[tuple[str, Tensor]], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under other names, one after another.

    Args:
        tensors: names and tensors.
        names: new ones by those that they replace; a name that is not there stays.
    """
    for name, tensor in tensors:
        yield names.get(name, name), tensor
        del tensor  # before the next one is gathered
