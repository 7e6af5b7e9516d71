"""Which matrices of a model the ranks of a tensor-parallel group split: the tensor-parallel plan of transformers."""

from typing import NoReturn

from torch import nn
from transformers import PreTrainedModel

from rft.strategy.parallel.experts import check_experts, find_experts, in_plan
from rft.strategy.parallel.tensor import SplitLinear, TensorParallel, TensorShard

FIRST, LAST = "colwise", "rowwise"
WHOLE = (None, "replicated_with_grad_allreduce", "embedding_rowwise")  # styles of layers that every rank holds whole


def tp_plan(backbone: PreTrainedModel, group: TensorParallel, key: str) -> list[TensorShard]:
    """The parts of a model that the ranks of a group split, beside its experts.

    Args:
        backbone: with weights or on the meta device.
        key: the model's place in the yaml.

    Raises:
        ValueError: the model cannot be split, or not by so many ranks; names the key.
    """
    config = backbone.config.get_text_config()
    plan = config.base_model_tp_plan or {}
    styles = {name: plan.get(in_plan(name)) for name, _ in backbone.named_modules()}
    experts = find_experts(backbone)
    names = [name for name, style in styles.items() if style not in WHOLE and name not in experts]

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
    check_share(config.to_dict().get("num_key_value_heads") or config.num_attention_heads, group.size, "key heads")
    check_experts(backbone, group.size, group.shards, group.key, key)
    shards = []
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = backbone.get_submodule(owner)
        children = {f"{owner}.{name}": child for name, child in module.named_children()}
        first, last = (
            {name: _split_linear(child) for name, child in children.items() if styles[name] == style}
            for style in (FIRST, LAST)
        )
        holders = {f"{owner}.{name.partition('.')[0]}" for name, _ in module.named_parameters()}
        known = all(styles.get(name) is not None for name in holders) and None not in (first | last).values()
        if not known or not first or len(last) != 1:
            refuse(f"its {owner} is not made of linear layers that its plan knows")
        columns, (row,) = [layer for layer in first.values() if layer], [layer for layer in last.values() if layer]
        for name, layer in zip(first, columns, strict=True):
            check_share(layer.base.out_features, group.size * group.shards, f"rows of {name}")
        shards.append(TensorShard(module, tuple(columns), row))
    return shards


def _split_linear(layer: nn.Module) -> SplitLinear | None:
    """A linear layer with or without an adapter of peft around it, or None for any other module."""
    if type(layer) is nn.Linear:
        return SplitLinear(layer, layer, None)
    linear = {name.partition(".")[0]: part for name, part in layer.named_modules() if type(part) is nn.Linear}
    if linear.keys() != {"base_layer", "lora_A", "lora_B"}:
        return None
    return SplitLinear(layer, linear["base_layer"], (linear["lora_A"], linear["lora_B"]))
