"""A sampler whose sampling parameters mode=doctor overrides."""

from collections.abc import Iterable

from torch import Tensor

from rft.algorithm.roles import POLICY
from rft.rollout.engine.base import Completion, OnCompletion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler
from rft.strategy.gather import GatherOptions


class OverridingSampler(Sampler):
    """Wraps the sampler of the run, and overrides its sampling parameters.

    Args:
        own: the sampler of the run.

    Attributes:
        plain: samples without truncation.
        greedy: takes the most likely tokens, so that an engine that ignores seeds repeats them, too.
    """

    def __init__(self, own: Sampler) -> None:
        self.plain = False
        self.greedy = False
        self._own = own

    @property
    def gather_options(self) -> GatherOptions:
        """Those of the sampler of the run."""
        return self._own.gather_options

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        if self.plain or self.greedy:
            sampling = sampling.untruncated(0.0 if self.greedy else sampling.temperature)
        return self._own.generate(requests, sampling, on_completion)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]], model: str = POLICY) -> None:
        self._own.publish(version, weights, model)

    def release(self) -> None:
        self._own.release()

    def abort(self) -> None:
        self._own.abort()

    def health(self) -> dict[str, float]:
        return self._own.health()

    def close(self) -> None:
        self._own.close()
