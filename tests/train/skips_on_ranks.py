"""Two runs of a file, the second without what is not finite; run by test_diverged.py, also under torchrun.

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
from rft.train import trainer
from rft.train.trainer import Trainer

CALLS: list[bool] = []  # of a function below: whether something is left out


@LOSSES.register("spoilt_updates", reads=("advantages", "old_logprobs", "unit", "version"))
def spoilt_updates(logprobs, batch, *, versions):
    """Not finite on one row of every step whose rows were sampled by one of these weights."""
    wrong = torch.isin(batch["version"], torch.tensor(versions)) & (batch["unit"] % 16 == 1)[:, None]
    return torch.where(wrong, math.nan, -logprobs * batch["advantages"]), {}


@LOSSES.register("spoilt_values", outputs=("values",), head="value", reads=("returns", "unit", "version"))
def spoilt_values(values, batch):
    """The same for the critic: one row of version 1."""
    wrong = (batch["version"] == 1) & (batch["unit"] % 16 == 1)[:, None]
    return torch.where(wrong, math.nan, (values - batch["returns"]) ** 2), {}


def without_spoilt(whole):
    """`Trainer.minimise` without the update that holds the row of version 1."""

    def minimise(run, model, part, prepared, *rest):
        rows = prepared.rows
        wrong = (rows["version"] == 1) & (rows["unit"] % 16 == 1)[:, None] & rows["loss_mask"]
        CALLS.append(any(run.world.gather(bool(wrong.any()))))
        if not CALLS[-1]:
            whole(run, model, part, prepared, *rest)

    return minimise


def without_spoilt_rows(whole):
    """`mini_batches` without the unit of that row in the second step of a run."""

    def mini_batches(*given):
        CALLS.append(len(CALLS) == 1)
        for units in whole(*given):
            yield units[units % 16 != 1] if CALLS[-1] else units

    return mini_batches


def main() -> None:
    torch.set_num_threads(1)
    faulty, without = json.loads(Path(sys.argv[1]).read_text())
    Job(faulty).fit("")
    if faulty["faults"]["nonfinite"] == "skip":
        Trainer.minimise = without_spoilt(Trainer.minimise)
    else:
        trainer.mini_batches = without_spoilt_rows(trainer.mini_batches)
    Job(without).fit("")
    leave()


if __name__ == "__main__":
    main()
