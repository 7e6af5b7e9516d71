"""Two ranks share servers; run by test_engine_on_ranks.py under torchrun, with the addresses of servers that run."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from rft.distributed import leave, start
from tests.conftest import SOON_S
from tests.rollout.server.scripted import KINDS, SAMPLING, make_engine, requests, said, weights


def main() -> None:
    folder, kind, *addresses = sys.argv[1:]
    world = start("cpu")
    changes = {"addresses": addresses, "sync_s": 0.5, "start_s": SOON_S, "sleep": True}
    engine = make_engine(world, KINDS[kind](), Path(folder), **changes)
    mine = requests(12)[world.rank :: 2]
    found, walked = {}, []

    def tensors(version):
        """Every rank holds a part of each, and must take part in its gathering."""
        for name, tensor in weights(version).items():
            walked.append(name)
            yield name, distribute_tensor(tensor, world.mesh, [Shard(0)]).full_tensor()

    for version in (0, 1):
        engine.update_weights(version, tensors(version))
        time.sleep(0.3 * world.rank * (version == 0))
        found[version] = said(engine.generate(mine, SAMPLING))
        if version == 0:
            engine.sleep()  # when the other rank has its samples, too
    world.gather(None)
    if world.rank == 0:
        Path(folder, "kill").touch()  # the test ends the first server now
        while not Path(folder, "killed").exists():
            time.sleep(0.02)
    dist.barrier()
    found["alone"] = said(engine.generate(mine, SAMPLING))
    engine.update_weights(2, tensors(2))
    found[2] = said(engine.generate(mine, SAMPLING))
    world.gather(None)
    if world.rank == 0:
        Path(folder, "kill all").touch()
        while not Path(folder, "killed all").exists():
            time.sleep(0.02)
    dist.barrier()
    vars(engine.options.servers)["start_s"] = 0.5
    try:
        engine.update_weights(3, tensors(3))
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["walked"] = walked
    everything = world.gather(found)
    if world.rank == 0:
        torch.save(everything, Path(folder, "found.pt"))
    engine.close()
    leave()


if __name__ == "__main__":
    main()
