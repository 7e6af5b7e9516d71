"""The factor of a loss whose gradient is computed in float16."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

CALM_UPDATES = 2000


@dataclass
class LossScale:
    """Multiplies a loss so that small parts of its float16 gradient do not vanish: dynamic scaling (1710.03740, 3.2).

    It doubles after 2000 updates in a row that were finite and halves at one that was not, which is then skipped.

    Attributes:
        factor: of the loss.
        moves: False where the gradient is in a dtype that needs no factor; then it is 1.
        calm: finite updates since the factor last moved.
    """

    factor: float
    moves: bool
    calm: int = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the factor out of the gradients again."""
        if self.moves:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.factor

    def advance(self) -> None:
        """After a finite update."""
        self.calm += 1
        if self.moves and self.calm == CALM_UPDATES:
            self.factor, self.calm = 2.0 * self.factor, 0

    def retreat(self) -> bool:
        """After a gradient that is not finite. False where a smaller factor would not help: it is 1 already."""
        if self.factor <= 1.0:
            return False
        self.factor, self.calm = self.factor / 2.0, 0
        return True
