"""The protocol of what remembers earlier steps: a checkpoint saves it, and a resumed run restores it."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Has the methods of `torch.distributed.checkpoint.stateful.Stateful`.

    The trainer calls both on every rank, so they may contain collectives. A state that is not sharded is the same on
    every rank, so that any number of ranks can restore it.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state: dicts, lists, tensors, numbers, texts and None. A checkpoint copies it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        ...


def states(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """The states of all parts. A collective."""
    return {key: part.state_dict() for key, part in parts.items()}


def load_states(parts: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Restores all parts from what `states` returned. A collective."""
    for key, part in parts.items():
        part.load_state_dict(saved[key])
