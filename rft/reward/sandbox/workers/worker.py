"""A worker in the sandbox: it builds a reward term once, and scores every job in a child process of its own.

`IsolatedPool` starts it as a program of the sandbox, with a socket as its stdin. The run sends pickles, which the
worker trusts; it answers with JSON, of which the run reads values, and no object that could execute code. A child
cannot write to this socket, and when its job ends, every process that it has started is killed and every file that it
has written is removed. So no job sees or changes another one.
"""

import gc
import importlib
import json
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rft.reward.build import build_term
from rft.reward.function import BatchFunction, RowFunction
from rft.reward.sandbox.isolation.messages import HEAD, read_message, write_message
from rft.reward.sandbox.isolation.view import WORK
from rft.reward.sandbox.options import CallLimits
from rft.reward.term import Failure, Term, Unscored, catching
from rft.reward.workers import score
from rft.sanitize import one_line
from rft.worker.fork_server import send_answer

NEXT, LAST = b"+", b"-"  # the first byte of an answer: the worker takes another job, or it ends
PAUSE_S = 0.05  # between two looks whether a child has ended that left its pipe to processes of its own
CHUNK = 65536


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs in order to build and run the term.

    Attributes:
        module: registers the function of the term; None where no registry names it.
        node, key: of the term in the yaml.
        deadline_s: seconds of a job.
        limits: of a job.
    """

    module: str | None
    node: dict[str, Any]
    key: str
    deadline_s: float
    limits: CallLimits


def main() -> None:
    """Builds the term, and scores jobs until the run closes the socket."""
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)  # as in the run, not as in a program
    line = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    setup: WorkerSetup = pickle.loads(read_message(line))
    try:
        if setup.module is not None:
            importlib.import_module(setup.module)
        term = build_term(setup.node, setup.key)
    except (ImportError, ValueError) as error:
        send_answer(line, json.dumps({"problem": str(error)}).encode())
        return
    send_answer(line, json.dumps(facts(term)).encode())
    gc.freeze()
    while True:
        try:
            job = read_message(line)
        except OSError:  # the run has ended
            return
        answer = Job(term, setup, line).run(job)
        again = clear(WORK)
        send_answer(line, (NEXT if again else LAST) + answer)
        if not again:
            return


def facts(term: Term) -> dict[str, Any]:
    """What the run needs to know of a term."""
    truth = isinstance(term, RowFunction | BatchFunction) and term.needs_truth
    return {"reads": list(term.reads), "rows_per_call": term.rows_per_call, "needs_truth": truth}


def clear(folder: str) -> bool:
    """Removes all files of a folder; False if one stays."""
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True


class Job:
    """Scores one job in a child process.

    Args:
        term: of the worker.
        setup: of the worker.
        line: the socket of the run, which the child closes.
    """

    def __init__(self, term: Term, setup: WorkerSetup, line: int) -> None:
        self._term = term
        self._setup = setup
        self._line = line
        self._most = setup.limits.output_kib * 1024

    def run(self, job: bytes) -> bytes:
        """The answer for a pickled pair of responses and rows; no process of the child is left."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(self._line)
                os.close(reader)
                write_message(writer, self._answer(job))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        try:
            return self._receive(reader, child)
        finally:
            os.close(reader)
            end_all()

    def _answer(self, job: bytes) -> bytes:
        resource.setrlimit(resource.RLIMIT_CPU, (self._setup.limits.cpu_seconds, self._setup.limits.cpu_seconds + 1))
        with catching() as caught:
            return encode(score(self._term, *pickle.loads(job)))
        assert caught.failure is not None
        return encode(caught.failure)

    def _receive(self, reader: int, child: int) -> bytes:
        """The answer that the child writes, or one in its place."""
        said = bytearray()
        deadline = time.monotonic() + self._setup.deadline_s
        ready = select.poll()
        ready.register(reader, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if ready.poll(1000 * min(left, PAUSE_S)):
                part = os.read(reader, CHUNK)
                said += part
                if len(said) > self._most + HEAD:
                    return _failed("output", f"it returns more than output_kib={self._setup.limits.output_kib}")
                if len(said) >= HEAD and len(said) >= HEAD + int.from_bytes(said[:HEAD]):
                    return bytes(said[HEAD:])
                if not part:
                    os.kill(child, signal.SIGKILL)  # it ends, or it has closed its pipe and runs on
                    return self._died(os.waitpid(child, 0)[1])
            elif (ended := os.waitpid(child, os.WNOHANG))[0]:  # a process that it has started holds the pipe
                return self._died(ended[1])
        return _failed("deadline", f"not done in deadline_s={self._setup.deadline_s:g}")

    def _died(self, status: int) -> bytes:
        """The answer in place of that of a child that has ended; `status` is as `os.waitpid` gives it."""
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return _failed("deadline", f"not done in cpu_seconds={self._setup.limits.cpu_seconds} of processor time")
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return _failed("worker_died", f"the worker process ended with {how}")


def _failed(reason: str, message: str) -> bytes:
    return encode(Failure(reason, message))


def end_all() -> None:
    """Kills all processes of the sandbox but this one and process 1, and waits for those that it has started."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def encode(found: Any) -> bytes:
    """The answer of a worker: what a term returned for the responses of a call, or a `Failure`."""
    return json.dumps(_plain(found)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        return {"failure": [value.reason, value.message]}
    if isinstance(value, Unscored):
        return {"unscored": value.reason}
    if isinstance(value, Mapping):
        return {"numbers": {str(name): _number(item) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _number(value)


def _number(value: Any) -> Any:
    """A number of python, numpy or torch; None for what the run does not accept as a score either."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def decode(answer: bytes) -> Any:
    """What the term returned: a value or a list of values, or a `Failure` if the answer is malformed.

    A worker may write anything.
    """
    try:
        return _value(json.loads(answer), lists=True)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return Failure("bad_answer", f"the worker answered with what is no score: {one_line(str(error))}")


def _value(value: Any, lists: bool) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list) and lists:
        return [_value(item, lists=False) for item in value]
    ((kind, content),) = value.items()
    if kind == "numbers":
        return {name: _value(item, lists=False) for name, item in content.items()}
    if kind == "unscored":
        return Unscored(one_line(content))
    if kind == "failure":
        reason, message = map(one_line, content)
        return Failure(reason, message)
    raise ValueError(f"an answer of the kind {kind!r}")
