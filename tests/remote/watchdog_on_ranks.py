"""One of several processes whose rank 1 fails; run by test_watchdog.py, and by torchrun.

watchdog_on_ranks.py <how rank 1 fails> <faults.dead_after_s> <faults.collective_timeout_s>
"""

import os
import signal
import sys
import time

from omegaconf import OmegaConf

from rft.distributed import leave, start
from rft.logger.redact import redact, resolve
from rft.remote import watchdog

os.environ["RFT_TEST_FILE"] = "/home/someone/secret.jsonl"
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
    if kind == "slow":
        slow()


def main() -> None:
    kind, dead_after, timeout = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    watchdog.GRACE = 2.0
    world = start("cpu")
    try:
        with watchdog.Watchdog(world, dead_after, timeout, redact):
            world.gather(None)
            if world.rank == 1:
                fail(kind)
            world.gather(world.rank)
    except ValueError as error:
        sys.stderr.write(f"rank {world.rank}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    leave()


if __name__ == "__main__":
    main()
