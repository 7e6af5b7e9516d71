"""A sampler whose sampling parameters mode=doctor overrides."""

from rft.rollout.engine.base import Completion, Engine, OnCompletion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import EngineSampler


class OverridingSampler(EngineSampler):
    """Samples with the engine of the run, and overrides its sampling parameters.

    Attributes:
        plain: samples without truncation.
        greedy: takes the most likely tokens, so that an engine that ignores seeds repeats them, too.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.plain = False
        self.greedy = False

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        if self.plain or self.greedy:
            sampling = sampling.untruncated(0.0 if self.greedy else sampling.temperature)
        return super().generate(requests, sampling, on_completion)
