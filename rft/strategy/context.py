"""Context parallelism: several ranks compute one sequence, a slice of its tokens each.

In attention tokens and heads change places (Ulysses, 2309.14509): a rank that held some tokens of all heads holds all
tokens of some heads, and back again behind it.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft.distributed import World


class Context:
    """The ranks that compute one sequence together, this one among them.

    Args:
        world: all processes; each run of `size` ranks is such a group. Making it is a collective.
        size: ranks of a group.

    Attributes:
        rank: this one's place in its group.
        key: the yaml key that asks for it.
        gathers_in_attention: attention is given slices, and makes all tokens of some heads of them.
    """

    key: ClassVar[str] = "strategy.context_parallel"
    gathers_in_attention: ClassVar[bool] = True

    def __init__(self, world: World, size: int) -> None:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)]
        self.group = groups[world.rank // size]
        self.rank, self.size = world.rank % size, size

    def gather(self, thing: Any) -> list[Any]:
        """What every rank of the group handed in, in order, on all of them."""
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Hands part r to rank r of the group and returns what every rank had for this one. Differentiable.

        Args:
            parts: one tensor a rank.
            shapes: of what arrives.
        """
        sizes = [math.prod(shape) for shape in shapes]
        flat = _Exchange.apply(
            torch.cat([part.reshape(-1) for part in parts]), [p.numel() for p in parts], sizes, self.group
        )
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def spread_heads(self, states: Tensor, counts: Sequence[int]) -> Tensor:
        """From this rank's tokens of all heads (1, H, n, D) to all tokens of its heads (1, H / size, N, D).

        Args:
            counts: tokens of every rank.
        """
        mine = states.chunk(self.size, dim=1)
        shapes = [(1, mine[0].shape[1], count, states.shape[3]) for count in counts]
        return torch.cat(self.exchange(mine, shapes), dim=2)

    def collect_heads(self, states: Tensor, counts: Sequence[int]) -> Tensor:
        """The way back: (1, H / size, N, D) to (1, H, n, D)."""
        parts = states.split(list(counts), dim=2)
        return torch.cat(self.exchange(parts, [tuple(parts[self.rank].shape)] * self.size), dim=1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = flat.new_empty(sum(received))
        dist.all_to_all_single(arrived, flat, received, sent, group=group)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        returned = gradient.new_empty(sum(ctx.sent))
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return returned, None, None, None
