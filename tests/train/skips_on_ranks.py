"""Two runs of a file, the second without the updates that are not finite; run by test_diverged.py, also under torchrun.

torchrun --nproc-per-node 2 skips_on_ranks.py configs.json
"""

import json
import math
import sys
from pathlib import Path

import torch

from rft.algorithm import LOSSES
from rft.distributed import leave
from rft.setup.assembly import Job
from rft.train.trainer import Trainer

CALLS: list[bool] = []  # of `without_spoilt`: whether the update is left out


@LOSSES.register("spoilt_updates", reads=("advantages", "old_logprobs", "unit", "version"))
def spoilt_updates(logprobs, batch, *, versions):
    """Not finite on one row of every step whose rows were sampled by one of these weights."""
    wrong = torch.isin(batch["version"], torch.tensor(versions)) & (batch["unit"] % 16 == 1)[:, None]
    return torch.where(wrong, math.nan, -logprobs * batch["advantages"]), {}


def without_spoilt(whole):
    """`Trainer.minimise` without the update that holds the row of version 1."""

    def minimise(trainer, model, part, prepared, *rest):
        rows = prepared.rows
        wrong = (rows["version"] == 1) & (rows["unit"] % 16 == 1)[:, None] & rows["loss_mask"]
        CALLS.append(any(trainer.world.gather(bool(wrong.any()))))
        if not CALLS[-1]:
            whole(trainer, model, part, prepared, *rest)

    return minimise


def main() -> None:
    torch.set_num_threads(1)
    skipping, without = json.loads(Path(sys.argv[1]).read_text())
    Job(skipping).fit("")
    Trainer.minimise = without_spoilt(Trainer.minimise)
    Job(without).fit("")
    leave()


if __name__ == "__main__":
    main()
