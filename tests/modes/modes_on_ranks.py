"""Runs the modes of the configs of a file on any number of ranks; what each rank prints goes to <folder><rank>.

torchrun --nproc-per-node 2 modes_on_ranks.py configs.json <folder>
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from rft.distributed import leave
from rft.modes import find_mode


def main() -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    with Path(sys.argv[2] + rank).open("w") as file, contextlib.redirect_stdout(file):
        for config in json.loads(Path(sys.argv[1]).read_text()):
            find_mode(config["mode"])(config, Console(quiet=rank != "0"))
    leave()


if __name__ == "__main__":
    main()
