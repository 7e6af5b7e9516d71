"""Which matrices of a model the ranks of a tensor-parallel group split: what its own plan in transformers says."""

import re
from typing import NoReturn

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import meta_model
from rft.strategy.tensor import TensorParallel, TensorShard

FIRST, LAST = "colwise", "rowwise"
WHOLE = (None, "replicated_with_grad_allreduce", "embedding_rowwise")  # they stay so here


def apply_tensor_parallel(backbone: PreTrainedModel, group: TensorParallel, key: str) -> None:
    """Splits the blocks of a model in place."""
    group.split(backbone, backbone.get_submodule("rotary_emb"), tp_plan(backbone, group, key))


def check_tensor_parallel(shape: PretrainedConfig, group: TensorParallel, key: str) -> None:
    """Looks for the parts in a model without weights; see `tp_plan`."""
    tp_plan(meta_model(shape).base_model, group, key)


def tp_plan(backbone: PreTrainedModel, group: TensorParallel, key: str) -> list[TensorShard]:
    """What the ranks of a group split.

    Raises:
        ValueError: the model cannot be split, or not by so many; names the key.
    """
    shape = backbone.config.get_text_config()
    plan = shape.base_model_tp_plan or {}
    styles = {name: plan.get(re.sub(r"\d+", "*", name)) for name, _ in backbone.named_modules()}
    names = [name for name, style in styles.items() if style not in WHOLE]

    def refuse(obstacle: str) -> NoReturn:
        raise ValueError(
            f"{group.key}={group.size}: {type(backbone).__name__} of {key} cannot be split ({obstacle}); set "
            f"{group.key}=1: its weights are sharded over all ranks all the same"
        )

    def check_share(count: int, ranks: int, what: str) -> None:
        if count % ranks:
            refuse(f"its {count} {what} do not divide over {ranks} ranks")

    if not names or "rotary_emb" not in styles:
        refuse("transformers has no plan for it")
    if foreign := sorted({str(styles[name]) for name in names} - {FIRST, LAST}):
        refuse(f"its plan in transformers asks for {', '.join(foreign)}")
    check_share(shape.to_dict().get("num_key_value_heads") or shape.num_attention_heads, group.size, "key heads")
    parts = []
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = backbone.get_submodule(owner)
        children = {f"{owner}.{name}": child for name, child in module.named_children()}
        first, last = ({n: c for n, c in children.items() if styles[n] == style} for style in (FIRST, LAST))
        held = {f"{owner}.{name}".rpartition(".")[0] for name, _ in module.named_parameters()}
        linear = all(type(layer) is nn.Linear for layer in (first | last).values())
        if any(styles[name] is None for name in held) or not linear or not first or len(last) != 1:
            refuse(f"its {owner} is not made of linear layers that its plan knows")
        for name, layer in first.items():
            check_share(layer.out_features, group.size * group.data.size(), f"rows of {name}")
        parts.append(TensorShard(module, tuple(first.values()), *last.values()))
    return parts
