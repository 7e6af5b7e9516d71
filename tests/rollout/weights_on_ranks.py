"""What each rank holds while a sharded model gives its weights away, and the weights that arrive.

torchrun --nproc-per-node 2 weights_on_ranks.py found.pt
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rft.actor.actor import Actor
from rft.distributed import World, leave, start
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.rollout.engine.base import Request
from rft.rollout.engine.hf import HFEngine
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import EngineSampler
from rft.rollout.server import weight_store
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.gather import WHOLE, GatherOptions
from tests.helpers import MODEL, engine_context, make_actor, make_optimizer, make_strategy

SHAPE = MODEL | {"hidden_size": 64, "intermediate_size": 1001}  # rows that do not divide over two ranks or four
EVEN = SHAPE | {"intermediate_size": 1000}  # as tensor parallelism needs
BUCKET = 2**16  # a quarter of the largest tensor in float32
SAMPLING = Sampling(8, 1.0, 1.0, 0, 0.0, [], None)
HALF = torch.bfloat16
LORA = {"rank": 4, "alpha": 8, "rslora": False, "targets": "all-linear", "quantize": None, "export": "merged"}


class Counted:
    """An actor, and the bytes that exist on this rank during each of some calls and after it.

    Attributes:
        largest, after: by the name of the call. `start` has the weights of the actor alone.
    """

    def __init__(self, world: World, actor: Mapping[str, Any], **strategy: Any) -> None:
        self.tracker = MemoryTracker(FSDP2.memory_labels)
        self.actor: Actor
        self._calls: list[str] = []

        def make() -> None:
            options = {"model_config": SHAPE, "micro_batch_tokens": 99, **actor}
            self.actor = make_actor(world, make_strategy(world, **strategy), make_optimizer(), **options)

        self.call("start", make)

    def call(self, name: str, work: Callable[[], Any]) -> None:
        self._calls.append(name)
        with self.tracker.watch():
            with self.tracker.stage(name):
                work()
            time.sleep(0.2)  # a thread of gloo frees the last buffers shortly after the collective has returned
            with self.tracker.stage(f"after {name}"):
                pass

    def bytes(self) -> dict[str, tuple[int, int]]:
        peaks = {name: sum(terms.values()) for name, terms in self.tracker.peaks().items()}
        return {name: (peaks[name], peaks[f"after {name}"]) for name in self._calls}


def engine(world: World, dtype: str, own: Any = None) -> dict[str, Any]:
    """The engine hf takes weights twice, samples and sleeps; `dtype` and `own` are that of the trainer and the key."""
    counted = Counted(world, {}, dtype=dtype)
    actor = counted.actor
    context = engine_context(actor.plain_model(), actor.tokenizer, computes=actor.strategy.dtype)
    made = HFEngine(context, 8, own, False)
    sampler = EngineSampler(made)
    for version in (0, 1):
        publish = partial(sampler.publish, version, actor.weights(sampler.gather_options))
        counted.call(f"publish {version}", publish)
    held = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    [[sampled]] = sampler.generate([Request([3, 4, 5], [7])], SAMPLING)
    counted.call("release", sampler.release)
    return {"bytes": counted.bytes(), "weights": held, "sampled": (sampled.tokens, sampled.logprobs)}


def store(world: World, options: GatherOptions, actor: Any = MappingProxyType({}), **strategy: Any) -> dict[str, Any]:
    """Rank 0 writes the weights of a sharded model for servers."""
    counted = Counted(world, actor, **strategy)
    with tempfile.TemporaryDirectory() as folder:
        weights = iter(counted.actor.weights(options))
        written = weight_store.WeightStore(Path(folder) / str(world.rank), None, options.dtype)

        def write() -> None:
            if world.rank == 0:
                written.keep(written.write(0, weights))
            for _ in weights:
                pass

        counted.call("write", write)
        found = {name: written.kept.read(name) for name in written.kept.tensors} if written.kept is not None else {}
    full = {name: tensor.clone() for name, tensor in counted.actor.weights(WHOLE)}
    return {"bytes": counted.bytes(), "weights": found, "full": full}


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    weight_store.BUCKET = BUCKET
    servers = GatherOptions(rank_zero_only=True)
    found = {
        "float32": engine(world, "float32"),
        "bfloat16": engine(world, "bfloat16"),
        "rounded": engine(world, "float32", "bfloat16"),
        "store, on every rank": store(world, WHOLE),
        "store": store(world, servers),
        "store, bfloat16": store(world, GatherOptions(HALF, rank_zero_only=True)),
        "store, adapters": store(world, servers, {"lora": LORA}),
    }
    if world.size == 4:
        found["store, replicas"] = store(world, servers, replicas=2)
        found["store, tensor parallel"] = store(world, servers, {"model_config": EVEN}, tensor_parallel=2)
    ranks = world.gather(found)
    if world.rank == 0:
        torch.save(ranks, Path(sys.argv[1]))
    leave()


if __name__ == "__main__":
    main()
