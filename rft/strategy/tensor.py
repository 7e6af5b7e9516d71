"""Tensor parallelism: several ranks compute one sequence together, each with a part of every matrix of the blocks.

Between two parts of a block each rank holds a slice of the tokens, as in context parallelism. A part, attention or MLP,
receives all tokens and computes with the heads and columns of this rank; its results are summed and scattered back to
the slices (Megatron-LM, 1909.08053; with slices 2205.05198). So no layer outside of the parts is computed twice.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rft.distributed import World
from rft.strategy.context import Context


@dataclass(frozen=True)
class TensorShard:
    """A part of a block that ranks split: the rows of its first layers and the columns of its last one.

    Attributes:
        module: its first argument is the hidden states (1, N, D); it returns the output of `last`.
        first: layers of weight (out, D).
        last: layer of weight (D, out).
    """

    module: nn.Module
    first: tuple[nn.Linear, ...]
    last: nn.Linear


class TensorParallel(Context):
    """The ranks that split the matrices of the blocks.

    Args:
        world: all processes; `size` consecutive ranks are a group. The constructor is a collective.
        size: ranks of a group.

    Attributes:
        data: the mesh over the ranks of all groups that hold the same part of the weights.
    """

    key = "strategy.tensor_parallel"
    gathers_in_attention = False

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world, size)
        shape = (world.size // size, size)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "tensor"))
        self.data, self._mesh = mesh["data"], mesh["tensor"]
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # warns of two gathers
        self._device = world.device
        self._counts: list[int] = []  # tokens of every rank's slice in the current forward
        self._positions = torch.empty(0)  # (1, N) positions of all tokens in their rows

    def apply_tensor_parallel(self, backbone: nn.Module, rotary: nn.Module, shards: Iterable[TensorShard]) -> None:
        """Splits parts of a model in place; the names of its parameters stay.

        Args:
            backbone: is called with the keyword `layout`.
            rotary: is called with hidden states and `position_ids`, and returns the position embeddings of attention.
        """
        backbone.register_forward_pre_hook(self._begin, with_kwargs=True)
        rotary.register_forward_pre_hook(self._use_all_positions, with_kwargs=True)
        for part in shards:
            part.module.register_forward_pre_hook(self._use_all_tokens, with_kwargs=True)
            for layer in part.first:
                self._shard_layer(layer, 0)
                vars(layer)["forward"] = partial(_first, layer)
            self._shard_layer(part.last, 1)
            vars(part.last)["forward"] = partial(self._last, part.last)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums, over the group, the gradients of weights that every rank of it holds whole, such as norms.

        Each rank of a group has computed other tokens or heads.
        """
        whole, _ = self._gradients(parameters)
        if whole:
            total = torch.cat([gradient.flatten() for gradient in whole])
            dist.all_reduce(total, group=self.group)
            for gradient, part in zip(whole, total.split([gradient.numel() for gradient in whole]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """See `Strategy.clip_grad_norm`; a weight that every rank of a group holds whole counts once."""
        whole, shards = self._gradients(parameters)
        square = nn.utils.get_total_norm(whole).square() / self.size + nn.utils.get_total_norm(shards).square()
        dist.all_reduce(square := square.to(self._device))
        norm = square.sqrt()
        for gradient in (*whole, *shards):
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradient.device))
        return norm

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's gradients: of weights that every rank of the group holds, and of shards of this rank alone."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor):
                found[parameter.grad.device_mesh != self.data].append(parameter.grad.to_local())
        return found

    def _shard_layer(self, layer: nn.Linear, dim: int) -> None:
        for name, parameter in list(layer.named_parameters()):
            if parameter.dim() > dim:
                part = distribute_tensor(parameter.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
                layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

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

    def _last(self, layer: nn.Linear, states: Tensor) -> Tensor:
        local = self._scatter(nn.functional.linear(states, _local(layer.weight)))
        return local if layer.bias is None else local + layer.bias

    def _gather(self, states: Tensor) -> Tensor:
        """From this rank's tokens (1, n, D) to those of all ranks (1, N, D)."""
        shapes = [(1, count, states.shape[2]) for count in self._counts]
        return torch.cat(self.exchange([states] * self.size, shapes), dim=1)

    def _scatter(self, states: Tensor) -> Tensor:
        """From this rank's summand of all tokens (1, N, D) to the sum over ranks of its own tokens (1, n, D)."""
        parts = states.split(self._counts, dim=1)
        return torch.stack(self.exchange(parts, [tuple(parts[self.rank].shape)] * self.size)).sum(0)


def _first(layer: nn.Linear, states: Tensor) -> Tensor:
    return nn.functional.linear(states, _local(layer.weight), None if layer.bias is None else _local(layer.bias))


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
