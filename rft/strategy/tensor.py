"""Tensor parallelism: several ranks compute one sequence together, each with a part of every matrix of the blocks.

Between two parts of a block each rank has a slice of the tokens, as in context parallelism. A part, attention or MLP,
is given all of them, computes with the heads and columns of this rank, and its results are summed on their way back to
the slices (Megatron-LM, 1909.08053; with slices 2205.05198). So nothing outside of the parts is computed twice.
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
    """What ranks split of a block: layers whose rows they split, and the one behind them whose columns they do.

    Attributes:
        module: takes the hidden states (1, N, D) first, and returns what `last` does.
        first: of weight (out, D).
        last: of weight (D, out).
    """

    module: nn.Module
    first: tuple[nn.Linear, ...]
    last: nn.Linear


class TensorParallel(Context):
    """The ranks that split the matrices of the blocks.

    Args:
        world: all processes; each run of `size` ranks is such a group. Making it is a collective.
        size: ranks of a group.

    Attributes:
        data: the mesh over ranks of all groups that have the same part of the weights.
    """

    key = "strategy.tensor_parallel"
    gathers_in_attention = False

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world, size)
        shape = (world.size // size, size)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "tensor"))
        self.data, self._mesh = mesh["data"], mesh["tensor"]
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # that it gathers twice
        self._device = world.device
        self._counts: list[int] = []  # tokens of every rank's slice in the forward that runs
        self._places = torch.empty(0)  # (1, N) and the places of all tokens in their rows

    def split(self, backbone: nn.Module, rotary: nn.Module, parts: Iterable[TensorShard]) -> None:
        """Splits the parts of a model in place; the names of its parameters stay.

        Args:
            backbone: is given `layout`.
            rotary: is given hidden states and `position_ids`, and says what attention is to know of places.
        """
        backbone.register_forward_pre_hook(self._begin, with_kwargs=True)
        rotary.register_forward_pre_hook(self._give_all_places, with_kwargs=True)
        for part in parts:
            part.module.register_forward_pre_hook(self._give_all_tokens, with_kwargs=True)
            for layer in part.first:
                self._keep(layer, 0)
                vars(layer)["forward"] = partial(_first, layer)
            self._keep(part.last, 1)
            vars(part.last)["forward"] = partial(self._last, part.last)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of what the blocks hold whole, as norms: every rank has seen other tokens or heads."""
        whole, _ = self._gradients(parameters)
        if whole:
            total = torch.cat([gradient.flatten() for gradient in whole])
            dist.all_reduce(total, group=self.group)
            for gradient, part in zip(whole, total.split([gradient.numel() for gradient in whole]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """See `FSDP2.clip_grad_norm`; what each rank of a group holds whole counts once. A collective."""
        whole, shards = self._gradients(parameters)
        square = nn.utils.get_total_norm(whole).square() / self.size + nn.utils.get_total_norm(shards).square()
        dist.all_reduce(square := square.to(self._device))
        norm = square.sqrt()
        for gradient in (*whole, *shards):
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's gradients: those that every rank of a group holds, and those that none but this one has."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor):
                found[parameter.grad.device_mesh != self.data].append(parameter.grad.to_local())
        return found

    def _keep(self, layer: nn.Linear, dim: int) -> None:
        for name, parameter in list(layer.named_parameters()):
            if parameter.dim() > dim:
                part = distribute_tensor(parameter.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
                layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def _begin(self, backbone: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
        self._counts = options["layout"].slice.counts
        self._places = options["layout"].positions[None]

    def _give_all_places(self, rotary: nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict]:
        if "position_ids" in options:
            return inputs, options | {"position_ids": self._places}
        return (inputs[0], self._places, *inputs[2:]), options

    def _give_all_tokens(self, module: nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict]:
        if "position_ids" in options:
            options = options | {"position_ids": self._places}
        if "hidden_states" in options:
            return inputs, options | {"hidden_states": self._gather(options["hidden_states"])}
        return (self._gather(inputs[0]), *inputs[1:]), options

    def _last(self, layer: nn.Linear, states: Tensor) -> Tensor:
        mine = self._scatter(nn.functional.linear(states, _local(layer.weight)))
        return mine if layer.bias is None else mine + layer.bias

    def _gather(self, states: Tensor) -> Tensor:
        """From this rank's tokens (1, n, D) to those of all (1, N, D)."""
        shapes = [(1, count, states.shape[2]) for count in self._counts]
        return torch.cat(self.exchange([states] * self.size, shapes), dim=1)

    def _scatter(self, states: Tensor) -> Tensor:
        """From a summand of all tokens (1, N, D) to the sum of this rank's (1, n, D)."""
        parts = states.split(self._counts, dim=1)
        return torch.stack(self.exchange(parts, [tuple(parts[self.rank].shape)] * self.size)).sum(0)


def _first(layer: nn.Linear, states: Tensor) -> Tensor:
    return nn.functional.linear(states, _local(layer.weight), None if layer.bias is None else _local(layer.bias))


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
