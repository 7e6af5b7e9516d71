"""A strategy of one's own: one process, plain torch, whole weights in float32."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.distributed import World
from rft.strategy.base import ModelFacts, Strategy, StrategyOptions
from rft.strategy.gather import WHOLE, GatherOptions


@dataclass(frozen=True)
class PlainOptions(StrategyOptions):
    """What `PlainStrategy` reads.

    Args:
        device: where to compute; read when the process starts.
    """

    device: Literal["auto", "cpu", "cuda"]

    def device_name(self) -> str:
        return self.device

    def check(self, models: Mapping[str, ModelFacts]) -> None:
        for key, facts in models.items():
            if facts.lora:
                raise ValueError(f"{key}.lora: PlainStrategy trains whole weights; set {key}.lora=null")


class PlainStrategy(Strategy):
    """Keeps the whole model in one process.

    Raises:
        ValueError: the run has several processes.
    """

    Options = PlainOptions

    def __init__(self, options: PlainOptions, world: World) -> None:
        if world.size > 1:
            raise ValueError(f"strategy._target_: PlainStrategy has one process, not {world.size}; use strategy=fsdp2")
        super().__init__(options, world)

    def check_model(
        self, config: PretrainedConfig, meta_model: Callable[[], PreTrainedModel], packing: bool, key: str
    ) -> None:
        size = sum(parameter.numel() for parameter in meta_model().parameters())
        if size > 10**9:
            raise ValueError(f"{key}.path: {size:,} weights are too many for PlainStrategy; use strategy=fsdp2")

    def shard(self, network: nn.Module, blocks: Iterable[nn.Module]) -> None:
        network.to(self.world.device)

    def backward(self, network: nn.Module, loss: Tensor, last: bool) -> None:
        loss.backward()

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(list(parameters), max_norm)

    def full_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], options: GatherOptions = WHOLE
    ) -> Iterator[tuple[str, Tensor]]:
        return iter(tensors)

    def model_state(self, network: nn.Module, with_frozen: bool) -> dict[str, Any]:
        frozen = {name for name, weight in network.named_parameters(remove_duplicate=False) if not weight.requires_grad}
        left_out = set() if with_frozen else frozen
        return {name: tensor for name, tensor in network.state_dict().items() if name not in left_out}

    def load_model_state(self, network: nn.Module, state: dict[str, Any]) -> None:
        network.load_state_dict(state, strict=False)

    def optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)
