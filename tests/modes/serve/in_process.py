"""mode=serve in the process of a test, which has imported torch; slow tests start the command."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from rft.modes.serve.run import serve


def serve_until(config, act, number=signal.SIGINT):
    """Serves until `act` ends, then signals this process; returns the lines that `act` has not read.

    Args:
        config: the resolved config.
        act: is called in a thread with the lines that `serve` prints, which it waits for.
    """
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    read, write = os.pipe()

    def beside(lines):
        try:
            act(lines)
        finally:
            os.kill(os.getpid(), number)

    for one in before:  # a script's background ignores interrupts
        signal.signal(one, signal.default_int_handler)
    try:
        with os.fdopen(read) as lines, ThreadPoolExecutor(1) as threads:
            with os.fdopen(write, "w") as file:
                acted = threads.submit(beside, lines)
                serve(config, Console(file=file, width=200))
            acted.result()
            return lines.read()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
