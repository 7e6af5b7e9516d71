"""What each of two processes gets from the collectives; run by test_distributed.py under torchrun."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rft.distributed import start
from rft.remote.watchdog import Watchdog


def refuse():
    raise ValueError("seed: no")


@contextmanager
def counting(travelled):
    """Notes the bytes of every all-to-all."""
    whole = dist.all_to_all_single

    def counted(output, given, *sizes):
        travelled.append(given.nbytes)
        return whole(output, given, *sizes)

    dist.all_to_all_single = counted
    yield
    dist.all_to_all_single = whole


def main() -> None:
    world = start("cpu")
    asked = []
    try:
        world.decide(refuse)
        answer = "none"
    except ValueError as error:
        answer = str(error)
    given = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    travelled: list[int] = []
    mine: list[Any] = [{"from": world.rank, "to": rank, "rows": torch.full((rank, 2), -0.0)} for rank in (0, 1)]
    mine[world.rank]["stays"] = torch.zeros(10_000)
    with counting(travelled):
        exchanged = world.exchange(mine)
    found = {
        "rank": world.rank,
        "size": world.size,
        "mesh": world.mesh.size(),
        "sum": world.all_sum(given).tolist(),
        "given": given.tolist(),
        "count": world.all_sum(torch.tensor(3 + world.rank)).item(),
        "gather": world.gather({"rank": world.rank}),
        "bytes": [data.tolist() for data in world.gather_bytes(torch.tensor([7, 8][: world.rank]).byte(), [0, 1])],
        "decided": world.decide(lambda: asked.append(world.rank) or f"chosen by {world.rank}"),
        "asked": asked,
        "refused": answer,
        "again": start("cpu").rank,
        "exchanged": [(parcel["from"], parcel["to"], parcel["rows"]) for parcel in exchanged],
        "stays": exchanged[world.rank] is mine[world.rank],
        "travelled": sum(travelled),
    }
    everything = world.gather(found)
    if world.rank == 0:
        torch.save(everything, Path(sys.argv[1]) / "found.pt")
    Path(sys.argv[1], f"failure{world.rank}").write_text(failure(world))
    os._exit(0)  # rank 0 loses its connection to rank 1, which has ended


def failure(world) -> str:
    """The error of this rank where rank 1 fails while rank 0 waits for it."""
    try:
        with Watchdog(world, 60.0, 60.0, str):
            if world.rank == 1:
                raise KeyError("difficulty")
            world.gather(None)
    except (KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    main()
