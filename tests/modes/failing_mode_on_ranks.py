"""Runs a mode on several ranks, of which rank 1 cannot sample; the error of each rank goes to <file><rank>.

torchrun --nproc-per-node 2 failing_mode_on_ranks.py config.json <file>
"""

import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from rft.modes import find_mode
from rft.rollout.engine.hf import HFEngine


def broken(*_, **__):
    raise ValueError("the engine is broken")


def main() -> None:
    torch.set_num_threads(1)
    rank, config = os.environ["RANK"], json.loads(Path(sys.argv[1]).read_text())
    if rank == "1":
        HFEngine.generate = broken
    try:
        find_mode(config["mode"])(config, Console(quiet=True))
    except ValueError as error:
        Path(sys.argv[2] + rank).write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # the process group is broken


if __name__ == "__main__":
    main()
