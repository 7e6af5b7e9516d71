"""Runs a command, and ends it with all that it has started as soon as whoever asked for it is gone, however it went.

Used as a script of the standard library alone: `python warden.py <seconds> <command> ...`. Its standard input is a pipe
that nobody writes to; it ends with the process at its other end. The command then has some seconds to end by itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    """Ends with the status of the command."""
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock the end of the interpreter would wait for
        send(child.pid, signal.SIGTERM)
        time.sleep(float(sys.argv[1]))
        send(child.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    status = child.wait()
    # What it has left behind: helpers that notice, tidy up shared memory and end; and whoever stays after all.
    patience = time.monotonic() + float(sys.argv[1])
    while lives(child.pid) and time.monotonic() < patience:
        time.sleep(0.02)
    send(child.pid, signal.SIGKILL)
    sys.exit(status if status >= 0 else 128 - status)


def lives(group: int) -> bool:
    """True where a process group has a process, be it one that has ended and that nobody has fetched."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def send(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, where there still is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
