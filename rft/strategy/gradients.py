"""The factor of a loss whose gradient is computed in float16."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

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
