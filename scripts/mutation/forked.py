"""Work in processes of their own, which begin as copies of this one."""

import ctypes
import json
import os
import select
import signal
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

PR_SET_PDEATHSIG = 1


def forked(works: Sequence[Callable[[], Any]], seconds: float) -> list[Any]:
    """What each of `works` returns, as JSON has it, or a sentence on how its process ended without an answer.

    They run at the same time, each in a process with temporary folders of its own.

    Args:
        seconds: then a process is killed, with all that it has started.
    """
    with TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        answers = [os.path.join(folder, str(number)) for number in range(len(works))]
        children = [_start(*pair) for pair in zip(works, answers, strict=True)]
        return [_answer(*pair, seconds) for pair in zip(children, answers, strict=True)]


def silence() -> None:
    """What this process prints from now on is lost."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _start(work: Callable[[], Any], answer: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()  # one group, with what the tests start and leave behind
            for variable in ("PYTEST_DEBUG_TEMPROOT", "RFT_CACHE"):
                os.environ[variable] = f"{answer}.{variable}"
                os.mkdir(os.environ[variable])
            text = json.dumps(work())
            with open(answer, "w") as file:
                file.write(text)
        finally:
            os._exit(0)
    return child


def _answer(child: int, answer: str, seconds: float) -> Any:
    handle = os.pidfd_open(child)
    select.select([handle], [], [], seconds)
    os.close(handle)
    os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process ended by {signal.Signals(os.WTERMSIG(status)).name} within {seconds:.0f} s"
    if not os.path.exists(answer):
        return "the process ended without an answer"
    with open(answer) as file:
        return json.load(file)
