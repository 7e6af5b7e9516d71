"""The gradients of an update: the factor of a loss whose gradient is computed in float16, and the norm of a gradient
whose tensors are spread over the ranks in different ways.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rft.distributed import World
from rft.strategy.gather import shard_count

GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """Multiplies a loss so that small parts of its float16 gradient do not vanish: dynamic scaling (1710.03740, 3.2).

    The factor doubles after 2000 finite updates in a row. It halves at an update that is not finite, which is skipped.

    Attributes:
        factor: of the loss.
        moves: False where the dtype of the gradient needs no factor; the factor is 1 then.
        calm: finite updates since the factor last moved.
    """

    factor: float
    moves: bool
    calm: int = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides the gradients by the factor."""
        if self.moves:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.factor

    def advance(self) -> None:
        """Counts a finite update; doubles the factor after enough of them."""
        self.calm += 1
        if self.moves and self.calm == GROWTH_INTERVAL:
            self.factor, self.calm = 2.0 * self.factor, 0

    def retreat(self) -> bool:
        """Halves the factor after a gradient that is not finite. Returns False where it is 1 already."""
        if self.factor <= 1.0:
            return False
        self.factor, self.calm = self.factor / 2.0, 0
        return True


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, world: World) -> Tensor:
    """Clips the global gradient norm and returns what it was; see `Strategy.clip_grad_norm`.

    `torch.nn.utils.clip_grad_norm_` needs all tensors on one mesh. Here what several ranks hold counts once.
    """
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(world.size // shard_count(gradient), []).append(gradient.to_local())
    squares = [nn.utils.get_total_norm(local).square() / count for count, local in by_copies.items()]
    square = torch.stack([each.to(world.device) for each in squares]).sum()
    torch.distributed.all_reduce(square)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local()
        local.mul_(factor.to(local.device))
    return norm
