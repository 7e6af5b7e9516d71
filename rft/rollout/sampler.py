"""The sampler owns the engine: requests in, completions out, new weights in.

Sources of batches, evaluation and the modes that generate text call a sampler, never an engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from rft.algorithm.roles import POLICY
from rft.rollout.engine.base import Begun, Completion, Engine, OnCompletion, Request
from rft.rollout.engine.sampling import Sampling
from rft.strategy.gather import WHOLE, GatherOptions


class Sampler(ABC):
    """Samples with the weights that were published last.

    Attributes:
        version: of these weights.
    """

    version: int = 0

    @abstractmethod
    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Samples every request of this rank with the published weights; see `Engine.generate`."""

    @property
    def gather_options(self) -> GatherOptions:
        """How `publish` takes the weights of a sharded model."""
        return WHOLE

    @abstractmethod
    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]], model: str = POLICY) -> None:
        """Hands over the weights that sample from now on. A collective.

        Args:
            version: of the weights; every token sampled from now on is stamped with it.
            weights: names and tensors as in the state dict of the transformers model, gathered by `gather_options`.
                They are read only if the sampler does not hold them yet.
            model: the key in the config of the model that they belong to. Versions of different models are unrelated.
        """

    @abstractmethod
    def release(self) -> None:
        """Gives the device to the trainer. Weights must be published again before the next `generate`. A collective."""

    def abort(self) -> None:
        """Stops sampling that is in flight; see `Engine.abort`. The run calls it when it fails."""

    def begun(self) -> list[Begun]:
        """What is known of samples of each order that has not `ended`; see `Engine.begun`."""
        return []

    def continue_from(self, begun: list[Begun]) -> None:
        """Hands over what an earlier run knew of samples, which are continued where they are asked for again."""

    def ended(self, order: int) -> None:
        """The samples of this order are complete and scored. Any thread may call it."""

    def health(self) -> dict[str, float]:
        """Numbers about sampling since the last call, logged as `engine/<name>`.

        Raises:
            RuntimeError: an engine is lost; names it.
        """
        return {}

    def close(self) -> None:
        """Ends what the sampler has started."""


class EngineSampler(Sampler):
    """Samples with one engine, which takes turns with the trainer.

    Args:
        engine: without weights; `close` closes it.

    Attributes:
        held: model and version of the weights that the engine holds; None while it sleeps or has none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.held: tuple[str, int] | None = None

    @property
    def gather_options(self) -> GatherOptions:
        """Those of the engine."""
        return self.engine.gather_options

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        return self.engine.generate(requests, sampling, on_completion)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]], model: str = POLICY) -> None:
        """Does nothing if the engine holds this version of the model. Otherwise the engine sleeps first, if it is
        awake, and wakes in two parts around the update of its weights. A collective."""
        if self.held == (model, version):
            return
        self.release()
        self._wake("weights")
        self.engine.update_weights(version, weights)
        self._wake("kv_cache")
        self.held, self.version = (model, version), version

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if not self.engine.facts.plain_torch:
            torch.cuda.empty_cache()  # the engine cannot use what torch keeps of the memory of past updates
        self.engine.wake(part)

    def release(self) -> None:
        """Puts the engine to sleep, if it is awake. Servers decide by their options what they free. A collective."""
        if self.held is not None:
            self.engine.sleep()
        self.held = None

    def abort(self) -> None:
        self.engine.abort()

    def begun(self) -> list[Begun]:
        return self.engine.begun()

    def continue_from(self, begun: list[Begun]) -> None:
        self.engine.continue_from(begun)

    def ended(self, order: int) -> None:
        self.engine.ended(order)

    def health(self) -> dict[str, float]:
        return self.engine.health()

    def close(self) -> None:
        self.engine.close()
