"""Sends rows with media between two processes; run by test_media.py under torchrun."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_media import rows_of

from rft.batch.balance import send
from rft.batch.collate import collate
from rft.distributed import leave, start


def main() -> None:
    world = start("cpu")
    rows = collate(rows_of())
    own = rows[:5] if world.rank == 0 else rows[5:]
    torch.save(send(world, own, own["scores"].long() % 2), Path(sys.argv[1]) / f"{world.rank}.pt")
    leave()


if __name__ == "__main__":
    main()
