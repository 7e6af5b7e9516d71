"""No engine: for runs in which nothing is sampled."""

from collections.abc import Callable, Iterable

from torch import Tensor

from rft.rollout.engine.base import Completion, Engine, Request
from rft.rollout.engine.sampling import Sampling


class NoEngine(Engine):
    """Takes no weights and answers nothing. A model with a score instead of a language head has no other."""

    rehearses = True

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None
    ) -> list[list[Completion]]:
        """Refuses.

        Raises:
            ValueError: always; names the key.
        """
        raise ValueError("rollout=none: nothing can be sampled; choose another rollout, such as rollout=hf")

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """None is gathered."""
