"""Where the backbone of a model is: the module without the head, and what the names of its tensors begin with."""

from transformers import PreTrainedModel


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
