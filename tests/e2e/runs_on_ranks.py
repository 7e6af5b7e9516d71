"""Runs the configs of a file one after another, on any number of ranks.

torchrun --nproc-per-node 2 runs_on_ranks.py configs.json
"""

import json
import sys
from pathlib import Path

import torch

from rft.distributed import leave
from rft.setup.assembly import Job


def main() -> None:
    torch.set_num_threads(1)
    for config in json.loads(Path(sys.argv[1]).read_text()):
        Job(config).fit("")
    leave()


if __name__ == "__main__":
    main()
