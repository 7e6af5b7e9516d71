"""A run on ranks under torchrun, one of which is killed.

torchrun --nproc-per-node 2 --max-restarts 1 killed_rank.py FOLDER [KILL]

FOLDER/config.json is the resolved config, and KILL the place where rank 1 is killed before torchrun starts the ranks
again, as JSON; see kills.py.
"""

import json
import os
import sys
from pathlib import Path

import torch

from rft.distributed import leave
from rft.setup.assembly import Job
from tests.e2e.kills import kill_at


def main() -> None:
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(sys.argv) > 2:
        kill_at(*json.loads(sys.argv[2]))
    Job(json.loads((Path(sys.argv[1]) / "config.json").read_text())).fit("")
    leave()


if __name__ == "__main__":
    main()
