"""A model of a reward term that is spread over the ranks: each holds its shards, and blocks are gathered to compute."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import blocks, load_model
from rft.actor.loading.deferred_init import Drawing
from rft.actor.model import empty_like, read_shards
from rft.distributed import World
from rft.reward.failure import leaving_collective
from rft.reward.models.offload import HeldModel
from rft.strategy.base import Strategy


class ShardedModel(HeldModel):
    """A model whose weights are spread over the ranks, from its first use on. Every use is a collective.

    Args:
        load: makes the sharded model, in evaluation mode.
        world: all processes.
        strategy: of the model.
        key: of the term in the yaml, which messages about a rank that hangs name.
    """

    def __init__(self, load: Callable[[], PreTrainedModel], world: World, strategy: Strategy, key: str) -> None:
        self._load = load
        self._world = world
        self._strategy = strategy
        self._key = key
        self._kept: PreTrainedModel | None = None

    def forwards(self, own: int) -> int:
        """See `HeldModel.forwards`: as many as the rank with most of them."""
        return int(max(self._world.gather(own)))

    def forward_pass(self) -> AbstractContextManager[None]:
        """See `HeldModel.forward_pass`: work that needs all ranks."""
        return self._world.wait.during(f"a forward pass of {self._key}")

    @contextmanager
    def loaded(self) -> Iterator[PreTrainedModel]:
        """See `HeldModel.loaded`.

        Raises:
            CollectiveError: an error is raised in the block, while other ranks compute with this one.
        """
        with leaving_collective():
            if self._kept is None:
                with self._world.wait.during(f"the loading of {self._key}"):
                    self._kept = self._load()
            yield self._kept
            self._strategy.reshard(self._kept)


def load_sharded(path: str, config: PretrainedConfig, kind: Any, strategy: Strategy) -> PreTrainedModel:
    """A model in evaluation mode; this rank reads its own shards of the files alone, where the strategy allows it.

    Args:
        path: a folder or hub name.
        kind: the auto class of transformers.
        strategy: spreads the model; its dtype is that of the weights.
    """
    drawing = Drawing() if strategy.shards_meta else None
    model = load_model(path, config, 0, kind, drawing=drawing)
    plain = empty_like(model, strategy.world.device)
    for parameter in model.parameters():  # torch chooses kernels by requires_grad, so it stays that of a whole model
        parameter.data = parameter.data.to(strategy.dtype)
    strategy.shard(model, blocks(model))
    read_shards(strategy, model, model, plain, path, drawing)
    return model.eval()
