"""Context parallelism: several ranks compute one sequence, a slice of its tokens each.

Attention exchanges tokens for heads (Ulysses, 2309.14509): before it a rank holds some tokens of all heads, in it all
tokens of some heads, and behind it some tokens of all heads again.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from rft.distributed import World
from rft.strategy.context import Context


class ContextParallel(Context):
    """The ranks that compute one sequence together, this one among them.

    Args:
        world: all processes; `size` consecutive ranks are a group. The constructor is a collective.
        size: ranks of a group.
    """

    key = "strategy.context_parallel"
    gathers_in_attention = True

    def __init__(self, world: World, size: int) -> None:
        groups = [world.new_group(range(first, first + size)) for first in range(0, world.size, size)]
        self.group = groups[world.rank // size]
        self.rank, self.size = world.rank % size, size

    def check_model(self, config: PretrainedConfig, packing: bool, key: str) -> None:
        if not packing:
            raise ValueError(f"{self.key}={self.size} needs packed rows: set {key}.packing=true")
        text = config.get_text_config()
        if "linear_attention" in (text.to_dict().get("layer_types") or ()):
            raise ValueError(
                f"{self.key}={self.size}: {key} is a {config.model_type}, whose linear attention ranks cannot share "
                f"yet; set {self.key}=1"
            )
        heads = text.num_attention_heads
        if heads % self.size:
            raise ValueError(
                f"{self.key}={self.size} does not divide the {heads} attention heads of {key}; choose a divisor"
            )

    def gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Sends part r to rank r of the group and returns the parts that the ranks sent to this one. Differentiable.

        Args:
            parts: one tensor for each rank.
            shapes: of the parts that arrive.
        """
        sizes = [math.prod(shape) for shape in shapes]
        flat = all_to_all(
            torch.cat([part.reshape(-1) for part in parts]), [p.numel() for p in parts], sizes, self.group
        )
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def all_to_all_heads(self, states: Tensor, counts: Sequence[int], to: Literal["heads", "tokens"]) -> Tensor:
        if to == "heads":
            by_head = states.chunk(self.size, dim=1)
            shapes = [(1, by_head[0].shape[1], count, states.shape[3]) for count in counts]
            return torch.cat(self.exchange(by_head, shapes), dim=2)
        by_token = states.split(list(counts), dim=2)
        return torch.cat(self.exchange(by_token, [tuple(by_token[self.rank].shape)] * self.size), dim=1)


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchanges rows, (n, ...) in the order of the ranks, for those that the ranks sent to this one. Differentiable.

    Args:
        sent: how many go to each rank.
        received: how many arrive from each rank.
    """
    arrived: Tensor = _AllToAll.apply(rows, sent, received, group)
    return arrived


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, received, sent, group=group)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        returned = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return returned, None, None, None
