"""One of several processes whose rank 1 fails; run by test_watchdog.py, and by torchrun.

watchdog_on_ranks.py <how rank 1 fails> <faults.dead_after_s> <faults.collective_timeout_s> <folder>
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh

from rft import waits
from rft.distributed import leave, start
from rft.logger.redact import resolve
from rft.redaction import redact
from rft.remote import watchdog
from rft.train.checkpoint import checkpoints
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.checkpoint.options import CheckpointOptions
from tests.helpers import make_batch, small_actor

os.environ["RFT_TEST_FILE"] = "/home/someone/secret.jsonl"
OPTIONS = CheckpointOptions(
    every=1, keep_last=1, keep_best=0, keep_every=0, export_every=2, fallback=None, export_dtype="auto"
)
SECRET = resolve(OmegaConf.create({"path": "${oc.env:RFT_TEST_FILE}"}))


def slow():
    time.sleep(8.0)


def hang():
    time.sleep(600.0)


def fail(kind):
    """What rank 1 does while the others wait for it."""
    if kind == "raise":
        raise ValueError(f"data.train: {SECRET['path']} is damaged")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        hang()
    if kind == "checkpoint":
        checkpoints.sync = lambda _: hang()
    if kind == "slow":
        slow()


def forward(world):
    """The forward pass of a sharded model, in whose first block rank 1 does not return."""
    actor = small_actor(world, trains=False)
    if world.rank == 1:
        actor._blocks[0].mlp.register_forward_pre_hook(lambda *_: hang())
    batch = make_batch()
    actor.compute_outputs(batch, ("logprobs",), 1.0, None)


def save(world):
    """A checkpoint whose files rank 1 never syncs, and the groups of a mesh; the second checkpoint waits for it."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    saved = Checkpoints(Path(sys.argv[4]), OPTIONS, world, "accuracy", lambda _: None)
    saved.write(1, {"w": torch.ones(3)}, lambda folder, dtype: None, None, False)
    time.sleep(2 * watchdog.EVERY)
    groups = dist.distributed_c10d._world.pg_map
    limits = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    sys.stderr.write(f"{len(groups)} groups with a timeout of {limits} s\n")
    assert saved._group in groups and mesh.get_group("replicate") in groups
    saved.wait()


def lack_rank(world):
    """A group that rank 1, which lives, does not make."""
    if world.rank == 1:
        hang()
    world.new_group(backend="gloo")


def make_group(world, outer):
    """Rank 1 is killed between two blocks within a block; the others make a group, for which they wait in the store."""
    with outer:
        world.gather(None)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with outer:
        world.new_group(backend="gloo")


def main() -> None:
    kind, dead_after, timeout = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    watchdog.GRACE, waits.SAY_AFTER_S = 2.0, 2.0
    world = start("cpu")
    try:
        with watchdog.Watchdog(world, dead_after, timeout, redact) as outer:
            world.gather(None)
            if kind == "group":
                make_group(world, outer)
            if kind == "lack":
                lack_rank(world)
            if kind == "forward":
                forward(world)
            if world.rank == 1:
                fail(kind)
            if kind == "checkpoint":
                save(world)
            world.gather(world.rank)
    except ValueError as error:
        sys.stderr.write(f"rank {world.rank}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    leave()


if __name__ == "__main__":
    main()
