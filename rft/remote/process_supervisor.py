"""Runs a command and ends it, with all processes that it started, when the parent process ends for any reason.

A script that needs the standard library alone: `python process_supervisor.py <seconds> <command> ...`. Its standard
input is a pipe into which the parent writes nothing; the pipe closes when the parent ends. The command then gets
SIGTERM, and after so many seconds SIGKILL. Shared memory outlives killed processes, so the supervisor removes files of
it that processes of the command have mapped, if they were created after the start, are accessible to the owner alone,
as such memory is, and no other process has mapped them. Servers leave sockets in the folder for temporary files too, so
the command gets a folder of its own there, which the supervisor removes.
"""

import contextlib
import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

SCAN_S = 1.0  # between scans of shared memory
SHARED = "/dev/shm"
PRIVATE = 0o100600  # a regular file that its owner alone can read and write


def main() -> None:
    """Exits with the status of the command."""
    with tempfile.TemporaryDirectory(prefix="rft-", ignore_cleanup_errors=True) as temporary:
        status = supervise(temporary)
    sys.exit(status if status >= 0 else 128 - status)


def supervise(temporary: str) -> int:
    """Runs the command with this folder for temporary files until all its processes have ended; returns its status."""
    before = set(glob.glob(f"{SHARED}/*"))
    # torch compiles into the common folder, so that the next server finds what this one compiles
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_uid_{os.getuid()}")
    environment = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "TMPDIR": temporary}
    child = subprocess.Popen(sys.argv[2:], env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    held: set[str] = set()

    def scan() -> None:
        if inodes := mapped(child.pid):
            held.update(file.path for file in os.scandir(SHARED) if file.inode() in inodes)

    def watch() -> None:
        known = before
        while True:
            files = set(glob.glob(f"{SHARED}/*"))
            if files - known:  # since a scan of the processes takes milliseconds
                scan()
            known = files
            time.sleep(SCAN_S)

    def end() -> None:
        os.read(0, 1)  # not through sys.stdin: the end of the interpreter would wait for its lock
        scan()
        send(child.pid, signal.SIGTERM)
        time.sleep(float(sys.argv[1]))
        send(child.pid, signal.SIGKILL)

    for work in (watch, end):
        threading.Thread(target=work, daemon=True).start()
    status = child.wait()
    scan()
    send(child.pid, signal.SIGTERM)  # to processes that the command left behind, such as a helper that cleans up
    deadline = time.monotonic() + float(sys.argv[1])
    while exists(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    send(child.pid, signal.SIGKILL)
    others = mapped(child.pid, by_others=True)
    for file in held - before:
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(file)
            if about.st_mode == PRIVATE and about.st_ino not in others:
                os.unlink(file)
    return status


def exists(group: int) -> bool:
    """True while a process group has a process, zombies included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def mapped(group: int, by_others: bool = False) -> set[int]:
    """Inodes of files of shared memory that processes of a group, or all other processes, have mapped.

    Inodes and not names, because a semaphore is mapped before it is renamed.
    """
    found = set()
    for path in glob.iglob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if (os.getpgid(int(path.split("/")[2])) == group) != by_others:
                with open(path) as lines:
                    found |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return found


def send(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
