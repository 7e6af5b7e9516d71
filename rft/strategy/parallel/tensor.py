"""Tensor parallelism: several ranks compute one sequence together, each with a part of every matrix of the blocks.

Between two parts of a block each rank holds a slice of the tokens, as in context parallelism. A part, attention or MLP,
receives all tokens and computes with the heads and columns of this rank; its results are summed and scattered back to
the slices (Megatron-LM, 1909.08053; with slices 2205.05198). So no layer outside of the parts is computed twice.

Which matrices these are says the tensor-parallel plan of transformers.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from rft.distributed import World
from rft.strategy.gather import to_local
from rft.strategy.parallel.context import ContextParallel
from rft.strategy.parallel.experts import ExpertParallel, check_experts, find_experts, in_plan
from rft.strategy.parallel.groups import group_meshes


@dataclass(frozen=True)
class SplitLinear:
    """A linear layer that ranks split, maybe with an adapter (LoRA) beside it: W x + b + scale * B A x.

    Attributes:
        module: is called; it calls the others. Without an adapter it is `base` itself.
        base: of weight W (out, in).
        adapter: the layers of weights A (rank, in) and B (out, rank), or None.
    """

    module: nn.Module
    base: nn.Linear
    adapter: tuple[nn.Linear, nn.Linear] | None


@dataclass(frozen=True)
class TensorShard:
    """A part of a block that ranks split: the rows of its first layers and the columns of its last one.

    Of adapters, B of the first layers and A of the last one are split alike; every rank holds the others whole.

    Attributes:
        module: its first argument is the hidden states (..., N, D); it returns the output of `last`.
        first: layers of weight (out, D).
        last: layer of weight (D, out).
    """

    module: nn.Module
    first: tuple[SplitLinear, ...]
    last: SplitLinear


class TensorParallel(ContextParallel):
    """The ranks that split the matrices of the blocks.

    Args:
        world: all processes; `size` consecutive ranks are a group. The constructor is a collective.
        size: ranks of a group.
        replicas: number of groups of ranks that each hold all the weights.

    Attributes:
        data: the mesh over the ranks of all groups that compute with the same part of the weights; two-dimensional
            where there are replicas.
        shards: number of ranks over which such a part is sharded.
        experts: splits the experts of a layer among the ranks of a group.
    """

    key = "strategy.tensor_parallel"
    gathers_in_attention = False

    def __init__(self, world: World, size: int, replicas: int = 1) -> None:
        super().__init__(world, size)
        self.shards = world.size // (replicas * size)
        self._mesh, self.data = group_meshes(world, size, replicas)
        self.experts = ExpertParallel(self._mesh, self.data)
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # warns of two gathers
        self._counts: list[int] = []  # tokens of every rank's slice in the current forward
        self._positions = torch.empty(0)  # (1, N) positions of all tokens in their rows

    def check_layers(self, meta_model: Callable[[], PreTrainedModel], key: str) -> None:
        tp_plan(meta_model().base_model, self, key)

    def split_layers(self, backbone: PreTrainedModel, key: str) -> None:
        shards = tp_plan(backbone, self, key)
        self.apply_tensor_parallel(backbone, backbone.get_submodule("rotary_emb"), shards)

    def apply_tensor_parallel(self, backbone: nn.Module, rotary: nn.Module, shards: Iterable[TensorShard]) -> None:
        """Splits parts of a model in place, without its experts; the names of its parameters stay.

        Args:
            backbone: is called with the keyword `layout`.
            rotary: is called with hidden states and `position_ids`, and returns the position embeddings of attention.
        """
        backbone.register_forward_pre_hook(self._begin, with_kwargs=True)
        rotary.register_forward_pre_hook(self._use_all_positions, with_kwargs=True)
        for part in shards:
            part.module.register_forward_pre_hook(self._use_all_tokens, with_kwargs=True)
            for layer in part.first:
                for linear in (layer.base, *(layer.adapter or ())[1:]):
                    self._shard_linear(linear, 0)
            for linear in (part.last.base, *(part.last.adapter or ())[:1]):
                self._shard_linear(linear, 1)
            part.last.module.register_forward_hook(partial(self._sum, part.last.base))

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums, over the group, the gradients of weights that every rank of it holds whole, such as norms.

        Each rank of a group has computed other tokens or heads.
        """
        gradients = (p.grad for p in parameters if isinstance(p.grad, DTensor))
        whole = [gradient.to_local() for gradient in gradients if gradient.device_mesh == self.data]
        if whole:
            total = torch.cat([gradient.flatten() for gradient in whole])
            dist.all_reduce(total, group=self.group)
            for gradient, part in zip(whole, total.split([gradient.numel() for gradient in whole]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _shard_linear(self, layer: nn.Linear, dim: int) -> None:
        for name, parameter in list(layer.named_parameters()):
            if parameter.dim() > dim:
                part = distribute_tensor(parameter.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
                layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        vars(layer)["forward"] = partial(_local_linear, layer, dim == 0)

    def _begin(self, backbone: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
        self._counts = options["layout"].shard.counts
        self._positions = options["layout"].positions[None]

    def _use_all_positions(self, rotary: nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict]:
        if "position_ids" in options:
            return inputs, options | {"position_ids": self._positions}
        return (inputs[0], self._positions, *inputs[2:]), options

    def _use_all_tokens(self, module: nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict]:
        if "position_ids" in options:
            options = options | {"position_ids": self._positions}
        if "hidden_states" in options:
            return inputs, options | {"hidden_states": self._gather(options["hidden_states"])}
        return (self._gather(inputs[0]), *inputs[1:]), options

    def _sum(self, base: nn.Linear, module: nn.Module, inputs: tuple, summand: Tensor) -> Tensor:
        states = self._scatter(summand)
        return states if base.bias is None else states + base.bias

    def _gather(self, states: Tensor) -> Tensor:
        """From this rank's tokens (..., n, D) to those of all ranks (..., N, D)."""
        shapes = [(*states.shape[:-2], count, states.shape[-1]) for count in self._counts]
        return torch.cat(self.exchange([states] * self.size, shapes), dim=-2)

    def _scatter(self, states: Tensor) -> Tensor:
        """From this rank's summand of all tokens (..., N, D) to the sum over ranks of its own tokens (..., n, D)."""
        parts = states.split(self._counts, dim=-2)
        return torch.stack(self.exchange(parts, [tuple(parts[self.rank].shape)] * self.size)).sum(0)


def _local_linear(layer: nn.Linear, with_bias: bool, states: Tensor) -> Tensor:
    bias = to_local(layer.bias) if with_bias and layer.bias is not None else None
    return nn.functional.linear(states, to_local(layer.weight), bias)


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
        complete = all(styles.get(name) is not None for name in holders) and None not in (first | last).values()
        if not complete or not first or len(last) != 1:
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
