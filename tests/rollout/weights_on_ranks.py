"""What each rank holds while a sharded model gives its weights away, and the weights that arrive.

torchrun --nproc-per-node 2 weights_on_ranks.py found.pt
"""

import os
import sys
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
from rft.rollout.server.weights import store
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.gather import WHOLE, to_local
from tests.helpers import MODEL, engine_context, make_actor, make_optimizer, make_strategy

SHAPE = MODEL | {"hidden_size": 64, "intermediate_size": 1001}  # rows that do not divide over two ranks or four
EVEN = SHAPE | {"intermediate_size": 1000}  # as tensor parallelism needs
FILE_BYTES = 2**16  # a quarter of the largest tensor in float32
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


class Sending(World):
    """The world, and the bytes that this rank sent to rank 0."""

    def __init__(self, world: World) -> None:
        self.__dict__ |= vars(world)
        self.sent: list[int] = []

    def gather_bytes(self, data: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        self.sent.append(len(data))
        return super().gather_bytes(data, lengths)


def engine(world: World, dtype: str, own: Any = None) -> dict[str, Any]:
    """The engine hf takes weights twice, samples and sleeps; `dtype` and `own` are that of the trainer and the key."""
    counted = Counted(world, {}, dtype=dtype)
    actor = counted.actor
    context = engine_context(actor.plain_model(), actor.tokenizer, computes=actor.strategy.dtype)
    made = HFEngine(HFEngine.Options(max_rows=8, dtype=own, cuda_graphs=False), context)
    sampler = EngineSampler(made)
    for version in (0, 1):
        publish = partial(sampler.publish, version, actor.weights(sampler.gather_options))
        counted.call(f"publish {version}", publish)
    held = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    [[sampled]] = sampler.generate([Request([3, 4, 5], [7])], SAMPLING)
    counted.call("release", sampler.release)
    return {"bytes": counted.bytes(), "weights": held, "sampled": (sampled.tokens, sampled.logprobs)}


def stored(
    world: World,
    folder: Path,
    dtype: torch.dtype | None = None,
    actor: Any = MappingProxyType({}),
    changed: int | None = None,
    **strategy: Any,
) -> dict[str, Any]:
    """The ranks write two versions of the weights of a sharded model for servers; the second changes a tensor.

    Args:
        changed: the number of elements of each rank that change, and the store sends changed elements only; None: all.
    """
    counted = Counted(world, actor, **strategy)
    sending = Sending(world)
    written = store.WeightStore(folder, None, dtype, sending, changed is not None)
    initial = {name: tensor.clone() for name, tensor in counted.actor.weights(WHOLE)}
    sent: list[int] = []
    for version in range(2):
        weights = counted.actor.weights(written.gather_options)
        counted.call(f"write {version}", lambda: written.keep(written.write(version, weights)))  # noqa: B023
        kept = written.kept
        assert kept is not None
        if version == 0:
            before = kept.tensors
            with torch.no_grad():
                last = [each for each in counted.actor.network.parameters() if each.requires_grad][-1]
                to_local(last).view(-1)[:changed].add_(1.0)
        sent.append(sum(sending.sent))
        sending.sent.clear()
    here = kept.folder.exists()
    found = {name: kept.read(name) for name in kept.tensors} if here else {}
    kept.verify() if here else None
    full = {name: tensor.clone() for name, tensor in counted.actor.weights(WHOLE)}
    return {
        "bytes": counted.bytes(),
        "sent": sent,
        "weights": found,
        "initial": initial,
        "full": full,
        "changed": [name for name in before if not before[name].equals(kept.tensors[name])],
        "parts": {name: tensor.parts for name, tensor in kept.tensors.items()},
    }


def failed(world: World, folder: Path) -> tuple[str, list[str]]:
    """The error where the disk of the last rank is full, and what is in the folder then."""
    real = os.fsync
    if world.rank == world.size - 1:
        os.fsync = full_disk
    error = ""
    try:
        stored(world, folder)
    except OSError as found:
        error = str(found)
    os.fsync = real
    return error, [path.name for path in folder.iterdir()]


def lost(world: World, folder: Path) -> str:
    """The error where rank 0 cannot read the version before, whose changed elements another rank sends."""
    actor = make_actor(world, make_strategy(world), make_optimizer(), model_config=SHAPE, micro_batch_tokens=99)
    written = store.WeightStore(folder, None, None, world, deltas=True)
    written.keep(written.write(0, actor.weights(written.gather_options)))
    with torch.no_grad():
        to_local([*actor.network.parameters()][-1]).view(-1)[:3].add_(1.0)
    if world.rank == 0:
        for path in (folder / "v0").glob("*.safetensors"):
            path.unlink()
    try:
        written.write(1, actor.weights(written.gather_options))
    except OSError as error:
        return str(error)
    return ""


def full_disk(file: int) -> None:
    raise OSError(28, "No space left on device")


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    store.FILE_BYTES, store.AHEAD = FILE_BYTES, 1
    folders = Path(sys.argv[1]).parent / "weights"
    found = {
        "float32": engine(world, "float32"),
        "bfloat16": engine(world, "bfloat16"),
        "rounded": engine(world, "float32", "bfloat16"),
        "store": stored(world, folders / "shared"),
        "store, bfloat16": stored(world, folders / "bfloat16", HALF),
        "store, adapters": stored(world, folders / "adapters", None, {"lora": LORA}),
        "store, apart": stored(world, folders / f"of rank {world.rank}"),
        "store, deltas": stored(world, folders / f"of rank {world.rank}", HALF, changed=3),
        "lost": lost(world, folders / f"lost of rank {world.rank}"),
        "failed": failed(world, folders / "full"),
    }
    if world.size == 4:
        machine = folders / f"of machine {world.rank // 2}"
        found["store, two machines"] = stored(world, machine, None, {"lora": LORA}, changed=3)
        found["store, replicas"] = stored(world, folders / "replicas", replicas=2)
        found["store, tensor parallel"] = stored(
            world, folders / "tensor", None, {"model_config": EVEN}, tensor_parallel=2
        )
    ranks = world.gather(found)
    if world.rank == 0:
        torch.save(ranks, Path(sys.argv[1]))
    leave()


if __name__ == "__main__":
    main()
