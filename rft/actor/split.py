"""Which matrices of a model the ranks of a tensor-parallel group split: what its own plan in transformers says."""

import re

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rft.strategy.tensor import Part, TensorParallel

FIRST, LAST, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"


def split(backbone: PreTrainedModel, group: TensorParallel, key: str) -> None:
    """Splits the blocks of a model in place."""
    group.split(backbone, backbone.get_submodule("rotary_emb"), find_parts(backbone, group.size, key))


def check_parts(shape: PretrainedConfig, size: int, key: str) -> None:
    """Looks for the parts in a model without weights; see `find_parts`."""
    with torch.device("meta"):
        find_parts(AutoModelForCausalLM.from_config(shape).base_model, size, key)


def find_parts(backbone: PreTrainedModel, size: int, key: str) -> list[Part]:
    """What so many ranks split.

    Raises:
        ValueError: the model cannot be split, or not by so many; names the key.
    """
    shape = backbone.config.get_text_config()
    plan = shape.base_model_tp_plan or {}
    styles = {name: plan.get(re.sub(r"\d+", "*", name)) for name, _ in backbone.named_modules()}
    names = [name for name, style in styles.items() if style not in (None, WHOLE)]
    heads = shape.to_dict().get("num_key_value_heads") or shape.num_attention_heads
    obstacle, cuts, parts = "", {"key and value heads": heads}, []
    if not names or "rotary_emb" not in styles:
        obstacle = "transformers has no plan for it"
    elif foreign := sorted({str(styles[name]) for name in names} - {FIRST, LAST}):
        obstacle = f"its plan in transformers asks for {', '.join(foreign)}"
    for owner in () if obstacle else dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = backbone.get_submodule(owner)
        layers = {name: styles[f"{owner}.{name}"] for name, _ in module.named_children()}
        first, last = ([module.get_submodule(n) for n in layers if layers[n] == style] for style in (FIRST, LAST))
        others = [n for n, _ in module.named_parameters() if layers.get(n.rpartition(".")[0]) is None]
        if others or not first or len(last) != 1 or any(type(layer) is not nn.Linear for layer in (*first, *last)):
            obstacle = f"its {owner} is not made of linear layers that the plan knows"
            break
        cuts[f"columns of {owner.rpartition('.')[2]}"] = last[0].in_features
        parts.append(Part(module, tuple(first), last[0]))
    if obstacle:
        raise ValueError(
            f"strategy.tensor_parallel={size}: {type(backbone).__name__} of {key} cannot be split ({obstacle}); set "
            "strategy.tensor_parallel=1: its weights are sharded over all ranks all the same"
        )
    for what, count in cuts.items():
        if count % size:
            raise ValueError(
                f"strategy.tensor_parallel={size} does not divide the {count} {what} of {key}; choose a divisor"
            )
    return parts
