"""LoRA (2106.09685): its options, what an actor does with the adapters of a model, and paths that name adapters.

The part `rft.actor.lora.adapters` makes adapters, and `rft.actor.lora.stored` reads them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers.utils import cached_file

from rft.imports import import_part
from rft.ranges import PositiveInt
from rft.strategy.gather import GatherOptions

CONFIG = "adapter_config.json"


@dataclass
class Lora:
    """Options of the adapters of an actor.

    Attributes:
        rank: of A and B.
        alpha: the product is scaled by alpha / rank.
        rslora: by alpha / sqrt(rank) instead.
        targets: `all-linear` (every linear layer but the head), or patterns of the last parts of their names: `q_proj`,
            `layers.0.*`.
        quantize: `nf4` packs the weights of all linear layers but the head into 4 bits; see `rft.actor.lora.nf4`.
        export: what a checkpoint's `actor/` holds: a model with the adapters `merged` in, or the `adapter` alone, as
            peft loads it beside the model of actor.path.
    """

    rank: PositiveInt
    alpha: PositiveInt
    rslora: bool
    targets: Literal["all-linear"] | list[str]
    quantize: Literal["nf4"] | None
    export: Literal["merged", "adapter"]

    def part(self, name: str, key: str) -> Any:
        """A function of `rft.actor.lora.adapters`, for the actor with this key."""
        return import_part("rft.actor.lora.adapters", name, f"{key}.lora")


class Adapters(ABC):
    """The adapters of a model.

    Attributes:
        exported_alone: see `Lora.export`.
        packed: the layers whose frozen weights are packed, by their names.
    """

    exported_alone: bool
    packed: Mapping[str, Any]

    @abstractmethod
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights of a model without adapters that computes the same, one at a time, spread as they are.

        A collective.
        """

    @abstractmethod
    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that the adapters are to be merged into. What is packed is not, then. A collective."""

    @abstractmethod
    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The weights beside the adapters, by the names that they have in a model without."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of A and B, spread as they are."""

    @abstractmethod
    def start_from(self, stored: Any) -> None:
        """Takes over a `StoredAdapter` of the same layers; before the model is sharded."""

    @abstractmethod
    def reset(self) -> None:
        """Makes the model compute as it would without adapters."""

    @abstractmethod
    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the whole `tensors` as a folder that `peft.PeftModel.from_pretrained` loads."""


@dataclass(frozen=True)
class LoraWeights(Iterable[tuple[str, Tensor]]):
    """Names and whole weights of a model, its adapters merged in, and the parts that they are merged from.

    To walk through any of them is a collective.

    Attributes:
        adapters: of the model.
        gather: `Strategy.full_tensors`.
        options: how merged weights and base weights are gathered. Adapters are not rounded.
        base_version: another number when the weights beside the adapters have changed.
    """

    adapters: Adapters
    gather: Callable[[Iterator[tuple[str, Tensor]], GatherOptions], Iterator[tuple[str, Tensor]]]
    options: GatherOptions
    base_version: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.gather(self.adapters.merged(), self.options)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The whole weights that the adapters are to be merged into."""
        return self.gather(self.adapters.base(), self.options)

    def alone(self) -> Iterator[tuple[str, Tensor]]:
        """What `Adapters.save` writes."""
        options = GatherOptions(rank_zero_only=self.options.rank_zero_only or self.options.sharded)
        return self.gather(self.adapters.tensors(), options)


def find_adapter(path: str) -> Any:
    """The `StoredAdapter` of a folder or hub name; None if that is one of a model alone. No tensor is read.

    Raises:
        ValueError: see `rft.actor.lora.stored.read_adapter`.
    """
    config = cached_file(path, CONFIG, _raise_exceptions_for_missing_entries=False)
    return None if config is None else import_part("rft.actor.lora.stored", "read_adapter", path)(path, config)


def model_path(path: str) -> str:
    """The folder or hub name with the config and the weights of a model: that of its base if the path is an adapter.

    Raises:
        ValueError: see `find_adapter`.
    """
    adapter = find_adapter(path)
    return path if adapter is None else str(adapter.base)
