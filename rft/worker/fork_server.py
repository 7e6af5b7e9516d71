"""The fork server: `python -m rft.worker.fork_server <file descriptor>`, started by `rft.worker.worker.ForkServer`.

It prepares the work of its workers once. It starts no threads, so it forks a worker in milliseconds. A request of the
run is a number: with one end of a socket it forks a worker of this number, which answers the calls that the run sends
over the socket; without one it ends this worker. All workers end when the run closes its end of the line, or dies.
"""

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Work = Callable[..., bytes]  # the answer of a worker to the arguments of a call
NUMBER = 8  # bytes of a request, and of the wait status that answers one to end a worker
HEAD = 8  # bytes of the length in front of an answer
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, the process of this number, ends. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def send_answer(line: int, answer: bytes) -> None:
    """Sends an answer, its length in front of it.

    Args:
        line: the descriptor of a socket.
    """
    text = memoryview(len(answer).to_bytes(HEAD) + answer)
    while text:
        text = text[os.write(line, text) :]


def main() -> None:
    """Prepares the work that the run names, and forks workers."""
    line = socket.socket(fileno=int(sys.argv[1]))
    _set_signals()
    prepare, arguments, silent = pickle.load(line.makefile("rb"))
    try:
        work: Work = prepare(*arguments)
    except ValueError as error:
        send_answer(line.fileno(), str(error).encode(errors="backslashreplace"))
        return
    _set_signals()  # a package that is prepared may have set handlers
    gc.freeze()  # a collection in a worker would write to every page that it shares
    send_answer(line.fileno(), b"")
    serve(line, work, silent)


def _set_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the run ends the line when it is interrupted
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def serve(line: socket.socket, work: Work, silent: bool) -> None:
    """Forks and ends workers until the run closes the line.

    Args:
        line: to the run.
        work: of the workers.
        silent: what workers print is dropped.
    """
    workers: dict[bytes, int] = {}
    server = os.getpid()
    while (request := _next_request(line))[0]:
        number, descriptors = request
        if not descriptors:
            with suppress(OSError):  # the run has ended; so the next request says
                line.sendall(end(workers.pop(number)).to_bytes(NUMBER))
            continue
        workers[number] = os.fork()
        if workers[number] == 0:
            line.close()
            run_worker(socket.socket(fileno=descriptors[0]), work, silent, server)
        os.close(descriptors[0])
    for pid in workers.values():
        end(pid)


def _next_request(line: socket.socket) -> tuple[bytes, list[int]]:
    """The number and the descriptors of a request; no number if the run has ended."""
    try:
        return socket.recv_fds(line, NUMBER, 1)[:2]
    except OSError:
        return b"", []


def end(pid: int) -> int:
    """Kills a worker and the processes that it has started; returns its wait status."""
    for kill in (os.killpg, os.kill):  # its group exists once it has called setsid
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return os.waitpid(pid, 0)[1]


def run_worker(line: socket.socket, work: Work, silent: bool, server: int) -> None:
    """Answers calls until the run closes the line. Does not return: an error of the work ends this process."""
    status = 1
    try:
        os.setsid()
        end_with_parent(server)
        if silent:
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
        _answer_calls(line, work)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    finally:
        kind, raised, trace = sys.exc_info()
        if kind is not None and raised is not None:
            sys.excepthook(kind, raised, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer_calls(line: socket.socket, work: Work) -> None:
    calls = line.makefile("rb")
    while True:
        try:
            arguments: tuple[Any, ...] = pickle.load(calls)
        except (EOFError, OSError, pickle.UnpicklingError):  # the run has closed the line, maybe within a call
            return
        answer = work(*arguments)
        sys.stdout.flush()  # the run may kill this process as soon as it has the answer
        try:
            send_answer(line.fileno(), answer)
        except OSError:
            return


if __name__ == "__main__":
    main()
