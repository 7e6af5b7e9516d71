"""Runs a command, and ends it with all that it has started as soon as whoever asked for it is gone, however it went.

Used as a script of the standard library alone: `python warden.py <seconds> <command> ...`. Its standard input is a pipe
that nobody writes to; it ends with the process at its other end. The command then has some seconds to end by itself.
Shared memory of Python's multiprocessing outlives processes that are killed: it is removed here.
"""

import contextlib
import glob
import os
import signal
import subprocess
import sys
import threading
import time

LOOK_S = 1.0  # between looks at what shared memory there is
SHARED = "/dev/shm"
MADE_BY_PYTHON = ("psm_", "sem.mp-")


def main() -> None:
    """Ends with the status of the command."""
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
    held: set[str] = set()

    def look() -> None:
        known: set[str] = set()
        while True:
            files = set(glob.glob(f"{SHARED}/*"))
            if files - known:  # for to ask the processes costs milliseconds
                held.update(shared(child.pid))
            known = files
            time.sleep(LOOK_S)

    def end() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock the end of the interpreter would wait for
        send(child.pid, signal.SIGTERM)
        time.sleep(float(sys.argv[1]))
        send(child.pid, signal.SIGKILL)

    for work in (look, end):
        threading.Thread(target=work, daemon=True).start()
    status = child.wait()
    send(child.pid, signal.SIGTERM)  # what it has left behind, such as a helper that tidies up and then ends
    patience = time.monotonic() + float(sys.argv[1])
    while lives(child.pid) and time.monotonic() < patience:
        time.sleep(0.02)
    send(child.pid, signal.SIGKILL)
    for file in tuple(held):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
    sys.exit(status if status >= 0 else 128 - status)


def lives(group: int) -> bool:
    """True where a process group has a process, be it one that has ended and that nobody has fetched."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def shared(group: int) -> set[str]:
    """The files of shared memory that processes of a group have mapped, if it is multiprocessing that made them."""
    mapped = set()  # by their numbers: a semaphore is mapped before it has its name
    for path in glob.iglob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if os.getpgid(int(path.split("/")[2])) == group:
                with open(path) as lines:
                    mapped |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    if not mapped:
        return set()
    return {file.path for file in os.scandir(SHARED) if file.inode() in mapped and file.name.startswith(MADE_BY_PYTHON)}


def send(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, where there still is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
