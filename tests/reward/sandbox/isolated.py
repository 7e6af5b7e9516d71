"""What the tests of the sandbox share: small limits, and the processes that a fork server has left behind."""

import os
import signal
import time
from pathlib import Path

from rft.reward.sandbox.programs import Limits, SandboxOptions
from rft.reward.sandbox.sandbox import LAYERS
from tests.conftest import SOON_S

LIMITS = Limits(
    seconds=3.0,
    cpu_seconds=2,
    memory_mib=256,
    processes=8,
    files_mib=4,
    files=50,
    open_files=32,
    output_kib=64,
)


def options(**changes):
    node = {"require": list(LAYERS), "workers": 2, "packages": [], "limits": LIMITS}
    return SandboxOptions(**node | changes)


def processes() -> dict[int, tuple[int, bool]]:
    """Of every process: its parent, and whether it is in a pid namespace below ours."""
    found = {}
    own = len(nested(Path("/proc/self/status").read_text()))
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if "\nState:\tZ" in text:  # it has ended, and its parent has not read its status
            continue
        parent = next(line for line in text.splitlines() if line.startswith("PPid:"))
        found[int(path.parent.name)] = (int(parent.split()[1]), len(nested(text)) > own)
    return found


def nested(status: str) -> list[str]:
    return next((line for line in status.splitlines() if line.startswith("NSpid:")), "NSpid:").split()[1:]


def left(server: int) -> set[int]:
    """Descendants of a fork server, and processes of pid namespaces whose supervisor has died."""
    known = processes()
    found = set()
    for process, (parent, below) in known.items():
        above = [parent]
        while above[-1] in known and above[-1] > 1:
            above.append(known[above[-1]][0])
        orphaned = below and server not in above and all(known.get(one, (0, True))[1] for one in above if one > 1)
        if server in above or orphaned:
            found.add(process)
    return found


def none_left(server: int) -> bool:
    """Whether a fork server has no process within seconds: a supervisor still exits when its verdict arrives."""
    deadline = time.monotonic() + SOON_S
    while left(server):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
