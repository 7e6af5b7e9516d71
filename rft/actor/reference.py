"""The frozen policy of KL terms where the policy trains adapters alone: its own network, with the adapters of then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.actor import Actor


class AdapterReference(Actor):
    """A reference without a model of its own: a copy of the policy's adapters takes their place while it computes.

    Args:
        policy: an actor with adapters. Until `copy_weights_from` the reference is what the policy is now.
    """

    def __init__(self, policy: Actor) -> None:
        self.policy = policy
        self.optimizer_options = None
        self.copy_weights_from(policy)

    @torch.no_grad()
    def copy_weights_from(self, other: Actor) -> None:
        """Keeps a copy of the policy's adapters."""
        assert other is self.policy and other.adapters is not None
        self._kept = [tensor.clone() for _, tensor in other.adapters.tensors()]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        assert self.policy.adapters is not None
        for kept, (_, tensor) in zip(self._kept, self.policy.adapters.tensors(), strict=True):
            other = tensor.clone()
            tensor.copy_(kept)
            kept.copy_(other)

    def compute(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None = None
    ) -> dict[str, Tensor]:
        """See `Actor.compute`."""
        with self._in_place():
            return self.policy.compute(batch, outputs, temperature, dummy)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Actor.weights`."""
        with self._in_place():
            yield from self.policy.weights()

    def state_dict(self) -> dict[str, Any]:
        """The kept adapters, whole, on the CPU of rank zero. A collective."""
        with self._in_place():
            return {"network": self.policy.strategy.model_state(self.policy.network, with_frozen=False)}

    def load_state_dict(self, state: dict[str, Any], with_optimizer: bool) -> None:
        """Takes up what `state_dict` wrote. A collective."""
        with self._in_place():
            self.policy.strategy.load_model_state(self.policy.network, state["network"])
