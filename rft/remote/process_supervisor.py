"""Runs a command, and ends it with all that it has started as soon as whoever asked for it is gone, however it went.

Used as a script of the standard library alone: `python warden.py <seconds> <command> ...`. Its standard input is a pipe
that nobody writes to; it ends with the process at its other end. The command then has some seconds to end by itself.
Shared memory outlives processes that are killed. What the command's processes have mapped is removed here, if it has
come since they began, is its owner's alone, as such memory is, and nobody else has mapped it.
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
PRIVATE = 0o100600  # a plain file that its owner alone reads and writes


def main() -> None:
    """Ends with the status of the command."""
    before = set(glob.glob(f"{SHARED}/*"))
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
    held: set[str] = set()

    def look() -> None:
        if mine := mapped(child.pid):
            held.update(file.path for file in os.scandir(SHARED) if file.inode() in mine)

    def watch() -> None:
        known = before
        while True:
            files = set(glob.glob(f"{SHARED}/*"))
            if files - known:  # for to ask the processes costs milliseconds
                look()
            known = files
            time.sleep(LOOK_S)

    def end() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock the end of the interpreter would wait for
        look()
        send(child.pid, signal.SIGTERM)
        time.sleep(float(sys.argv[1]))
        send(child.pid, signal.SIGKILL)

    for work in (watch, end):
        threading.Thread(target=work, daemon=True).start()
    status = child.wait()
    look()
    send(child.pid, signal.SIGTERM)  # what it has left behind, such as a helper that tidies up and then ends
    patience = time.monotonic() + float(sys.argv[1])
    while lives(child.pid) and time.monotonic() < patience:
        time.sleep(0.02)
    send(child.pid, signal.SIGKILL)
    others = mapped(child.pid, by_others=True)
    for file in held - before:
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(file)
            if about.st_mode == PRIVATE and about.st_ino not in others:
                os.unlink(file)
    sys.exit(status if status >= 0 else 128 - status)


def lives(group: int) -> bool:
    """True where a process group has a process, be it one that has ended and that nobody has fetched."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def mapped(group: int, by_others: bool = False) -> set[int]:
    """The numbers of the files of shared memory that processes of a group have mapped, or all others.

    Not the names: a semaphore is mapped before it has its own.
    """
    found = set()
    for path in glob.iglob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if (os.getpgid(int(path.split("/")[2])) == group) != by_others:
                with open(path) as lines:
                    found |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return found


def send(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, where there still is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
