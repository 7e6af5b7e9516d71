"""The engine of runs that sample nothing."""

from collections.abc import Iterable

from torch import Tensor

from rft.rollout.engine.base import Completion, Engine, EngineFacts, OnCompletion, Request
from rft.rollout.engine.sampling import Sampling


class NoEngine(Engine):
    """Takes no weights and samples nothing. It is the only engine for a model with a score head."""

    facts = EngineFacts(samples=False, plain_torch=True)

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Fails.

        Raises:
            ValueError: always; names the key.
        """
        raise ValueError("rollout=none: nothing can be sampled; choose another rollout, such as rollout=hf")

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Ignores them, so none is gathered."""
