"""A reference that is no model of its own: the policy's network with kept adapters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import ColumnModel, Columns, ModelContext, ModelOptions, TrainableModel
from rft.actor.lora.base import Adapters
from rft.actor.optim.ema import swapped
from rft.strategy.gather import WHOLE, GatherOptions


class AdapterReference(ColumnModel):
    """A reference without weights of its own: kept adapters replace those of the policy while it computes.

    Args:
        context: of the policy, with the key of the reference.
        policy: a model with adapters. Until `copy_weights_from` is called the reference is the policy as it is now.
        adapters: of the policy.
    """

    def __init__(self, context: ModelContext, policy: TrainableModel, adapters: Adapters) -> None:
        super().__init__(context, ModelOptions())
        self.policy = policy
        self._adapters = adapters
        self.copy_weights_from(policy)

    @torch.no_grad()
    def copy_weights_from(self, other: TrainableModel) -> None:
        """Keeps a copy of the policy's adapters."""
        assert other is self.policy
        self._kept = [tensor.clone() for _, tensor in self._adapters.tensors()]

    def _in_place(self) -> AbstractContextManager[None]:
        current = (tensor for _, tensor in self._adapters.tensors())
        return swapped(list(zip(self._kept, current, strict=True)))

    def compute_outputs(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None
    ) -> Columns:
        with self._in_place():
            return self.policy.compute_outputs(batch, outputs, temperature, dummy)

    def weights(self, options: GatherOptions = WHOLE) -> Iterator[tuple[str, Tensor]]:
        with self._in_place():
            yield from self.policy.weights(options)

    def state_dict(self) -> dict[str, Any]:
        """The kept adapters."""
        names = (name for name, _ in self._adapters.tensors())
        return {"network": dict(zip(names, self._kept, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        for kept, tensor in zip(self._kept, state["network"].values(), strict=True):
            kept.copy_(tensor)
