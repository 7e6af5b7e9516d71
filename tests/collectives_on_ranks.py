"""What each of two processes gets from the collectives; run by test_distributed.py under torchrun."""

import sys
from pathlib import Path

import torch

from rft.distributed import leave, start


def refuse():
    raise ValueError("seed: no")


def main() -> None:
    world = start("cpu")
    asked = []
    try:
        world.decide(refuse)
        answer = "none"
    except ValueError as error:
        answer = str(error)
    given = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    found = {
        "rank": world.rank,
        "size": world.size,
        "mesh": world.mesh.size(),
        "sum": world.all_sum(given).tolist(),
        "given": given.tolist(),
        "count": world.all_sum(torch.tensor(3 + world.rank)).item(),
        "gather": world.gather({"rank": world.rank}),
        "decided": world.decide(lambda: asked.append(world.rank) or f"chosen by {world.rank}"),
        "asked": asked,
        "refused": answer,
        "again": start("cpu").rank,
    }
    everything = world.gather(found)
    if world.rank == 0:
        torch.save(everything, Path(sys.argv[1]))
    leave()


if __name__ == "__main__":
    main()
