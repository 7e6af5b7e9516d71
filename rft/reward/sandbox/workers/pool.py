"""Isolated worker processes for a reward term: no call harms the run, reads the machine, or changes another call.

Each worker is a program in the sandbox; see `rft.reward.sandbox.workers.worker`.
"""

import importlib.util
import json
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rft
from rft.reward import REWARDS
from rft.reward.build import build_term
from rft.reward.failure import Failure
from rft.reward.function import ground_truth
from rft.reward.runners import Outcomes, Rows, Runner, outcomes
from rft.reward.sandbox.isolation.messages import HEAD, framed
from rft.reward.sandbox.options import Limits, SandboxOptions, WorkerOptions
from rft.reward.sandbox.sandbox import Sandbox, SandboxFailed, Spawned
from rft.reward.sandbox.workers.answer import decode
from rft.reward.sandbox.workers.worker import LAST, WorkerSetup
from rft.reward.term import Term
from rft.sanitize import one_line
from rft.waits import waiting

START_S = 120.0  # a worker that has not built the term by then is ended
GRACE_S = 10.0  # and so is one that is silent for so long beyond the deadline of a job
END_S = 2.0  # for the sandbox to say how a worker ended
UNLIMITED = 10**9  # seconds; the deadline and the processor time of a worker are those of its jobs
CHUNK = 65536
LIBRARIES = ("site-packages", "dist-packages")
PROGRAM = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
sys.path += {path!r}
from rft.reward.sandbox.workers.worker import main
main()
"""


class WorkerLost(OSError):
    """A worker that ended, is silent, or could not be started.

    Attributes:
        reason: of the failure of its job.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IsolatedWorker:
    """One worker. The constructor starts it.

    Args:
        sandbox: runs it.
        program: its source.
        setup: what it builds.

    Attributes:
        facts: of the term, as the worker states them.

    Raises:
        WorkerLost: it cannot build the term, or does not start.
    """

    def __init__(self, sandbox: Sandbox, program: str, setup: WorkerSetup) -> None:
        limits = Limits(**asdict(setup.limits) | {"seconds": UNLIMITED, "cpu_seconds": UNLIMITED})
        limits = replace(limits, processes=limits.processes + 1)  # the worker itself
        self._most = setup.limits.output_kib * 1024
        self._line, other = socket.socketpair()
        try:
            with other:  # the worker closes stderr before it imports what it does not trust
                self._process: Spawned = sandbox.spawn(program, limits, (other.fileno(), other.fileno(), 2))
        except (SandboxFailed, ValueError) as error:
            self._line.close()
            raise WorkerLost("no_workers", str(error)) from error
        try:
            self.facts = json.loads(self._exchange(pickle.dumps(setup), START_S))
            problem = self.facts.get("problem")
        except (ValueError, AttributeError, RecursionError) as error:
            problem = repr(error)
        if problem is not None:
            self.end()
            raise WorkerLost("no_workers", one_line(str(problem)))

    def run(self, job: bytes, seconds: float) -> tuple[bytes, bool]:
        """The answer to a job, and whether the worker takes another one.

        Raises:
            WorkerLost: it gave no answer; it is ended.
        """
        answer = self._exchange(job, seconds)
        return answer[1:], answer[:1] != LAST

    def end(self, patience_s: float = 0.0) -> dict[str, Any]:
        """Ends the worker and all its processes; see `Spawned.end`."""
        self._line.close()
        return self._process.end(patience_s)

    def interrupt(self) -> None:
        """Makes a `run` in another thread fail."""
        self._line.shutdown(socket.SHUT_RDWR)

    def _exchange(self, message: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        try:
            self._line.settimeout(seconds)
            self._line.sendall(framed(message))
            length = int.from_bytes(self._receive(HEAD, deadline))
            if length > self._most + 1:
                raise WorkerLost("output", f"it answers with {length} bytes, more than output_kib allows")
            return self._receive(length, deadline)
        except WorkerLost:
            self.end()
            raise
        except TimeoutError as error:
            self.end()
            raise WorkerLost("deadline", f"the worker is silent for {seconds:g} s") from error
        except OSError as error:
            verdict = self.end(END_S)
            reason = "memory" if verdict["status"] == "memory" else "worker_died"
            said = f"{verdict['status']} {verdict['reason']}".strip()
            raise WorkerLost(reason, f"the worker ended: {said}") from error

    def _receive(self, count: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < count:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._line.settimeout(left)
            part = self._line.recv(min(CHUNK, count - len(found)))
            if not part:
                raise ConnectionError("the worker has closed its line")
            found += part
        return bytes(found)


class IsolatedPool(Runner):
    """The isolated workers of one term. They start with the first jobs and end with the run.

    Args:
        name: of the term.
        node, key: of the term in the yaml.
        workers: processes at the same time.
        deadline_s: seconds of one job from its start in a worker.
        options: of the sandbox.

    Raises:
        ValueError: the function cannot be shown to a worker; names the key.
    """

    def __init__(
        self, name: str, node: Mapping[str, Any], key: str, workers: int, deadline_s: float, options: WorkerOptions
    ) -> None:
        node, module, shown, path = visible(node, key)
        self._name = name
        self._setup = WorkerSetup(module, node, key, deadline_s, options.limits)
        self._program = PROGRAM.format(path=[*path, *options.packages])
        limits = Limits(**asdict(options.limits), seconds=START_S)
        sandboxed = SandboxOptions(options.require, workers, options.packages, limits)
        self._sandbox = Sandbox(sandboxed, f"{key}.call.sandbox", shown=shown)
        self._threads = ThreadPoolExecutor(workers, name)
        self._idle: queue.SimpleQueue[IsolatedWorker] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy: set[IsolatedWorker] = set()
        self._facts: dict[str, Any] | None = None

    def facts(self) -> dict[str, Any]:
        """What a worker states about the term: `reads`, `rows_per_call` and `needs_truth`. Starts it once.

        Raises:
            ValueError: a layer is missing, or the worker cannot build the term; names the key and the cure.
        """
        if self._facts is None:
            self._sandbox.check()
            try:
                with waiting(f"{self._setup.key}: the run waits for a worker, which builds the term"):
                    worker = self._worker()
            except WorkerLost as error:
                raise ValueError(str(error)) from error
            self._idle.put(worker)
            try:
                reads = tuple(map(str, worker.facts["reads"]))
                size = None if worker.facts["rows_per_call"] is None else 1
                truth = bool(worker.facts["needs_truth"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"{self._setup.key}: the worker states no facts of the term ({error!r})") from error
            self._facts = {"reads": reads, "rows_per_call": size, "needs_truth": truth}
        return self._facts

    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        """Scores responses in a worker.

        Returns:
            What the term returns, or a `Failure` for each response. Its reason is `deadline`, `worker_died`, `memory`,
            `output`, `no_workers`, `bad_answer`, or the type of the error that the function raised.
        """
        job = pickle.dumps((list(responses), list(rows)))
        return self._threads.submit(self._score, job, list(responses))

    def _score(self, job: bytes, responses: list[str]) -> Outcomes:
        try:
            worker = self._worker()
            with self._lock:
                self._busy.add(worker)
            try:
                answer, again = worker.run(job, self._setup.deadline_s + GRACE_S)
            finally:
                with self._lock:
                    self._busy.discard(worker)
            if again:
                self._idle.put(worker)
            else:
                worker.end()
            found = decode(answer)
        except WorkerLost as error:
            found = Failure(error.reason, str(error))
        return outcomes(found, responses, self._name)

    def _worker(self) -> IsolatedWorker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return IsolatedWorker(self._sandbox, self._program, self._setup)

    def cancel(self) -> None:
        """See `Runner.cancel`; workers in the middle of a job are killed."""
        with self._lock:
            for worker in self._busy:
                worker.interrupt()

    def close(self) -> None:
        """Ends the workers and the fork server of the sandbox. The next job starts them again."""
        self.cancel()
        while not self._idle.empty():
            self._idle.get_nowait().end()
        self._sandbox.close()


class IsolatedTerm(Term):
    """A term that isolated workers compute. The run does not import the file of a user's function.

    Args:
        node, key: of the term in the yaml.
        pool: its workers.
    """

    def __init__(self, node: Mapping[str, Any], key: str, pool: IsolatedPool) -> None:
        self._pool = pool
        self._rule = build_term(node, key) if "function" not in node else None
        self._needs_truth = False
        if self._rule is not None:
            self.reads, self.extracts, self.others = self._rule.reads, self._rule.extracts, self._rule.others
            self.rows_per_call = self._rule.rows_per_call
            self.thoughts, self.opening = self._rule.thoughts, self._rule.opening
            self.tool_calls = self._rule.tool_calls
        else:
            stated = pool.facts()
            self.reads, self.rows_per_call = stated["reads"], stated["rows_per_call"]
            self._needs_truth = stated["needs_truth"]

    def check(self) -> None:
        """Checks that the layers are available and that a worker can build the term."""
        self._pool.facts()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """See `Term.check_row`."""
        if self._rule is not None:
            self._rule.check_row(row)
        if self._needs_truth:
            ground_truth(row)

    def values(self, responses: Sequence[str], rows: Rows) -> Outcomes:
        """See `Term.values`."""
        return self._pool.submit(responses, rows).result()

    def extract(self, response: str) -> str | None:
        """See `Term.extract`."""
        return self._rule.extract(response) if self._rule is not None else None

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
        """See `Term.gold_responses`."""
        return self._rule.gold_responses(row) if self._rule is not None else ()


def visible(node: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str | None, list[str], list[str]]:
    """What a worker sees of this environment.

    Returns:
        The node with an absolute path in place of a relative one; the module that registers the function, or None;
        the files and folders that are shown; and the folders that modules are imported from.

    Raises:
        ValueError: there is no such file or module; names the key.
    """
    libraries = [folder for folder in sys.path if Path(folder).name in LIBRARIES]
    place = str(Path(rft.__file__).parent)
    shown, path = [place, *libraries], [str(Path(place).parent), *libraries]
    module = REWARDS.function(node["name"]).__module__ if "name" in node else None
    file, _, name = str(node.get("function", "")).rpartition(":")
    if file.endswith(".py"):
        found = Path(file).expanduser().resolve()
        if not found.is_file():
            raise ValueError(f"{key}.function={node['function']}: there is no such file")
        return {**node, "function": f"{found}:{name}"}, None, [*shown, str(found)], path
    top = (module or file).partition(".")[0]
    if top != rft.__name__:
        origin = _origin(top)
        if origin is None:
            raise ValueError(f"{key}: a worker cannot import {top!r}; put the function into a file or a package")
        shown += [str(origin), str(origin.resolve())]
        path.append(str(origin.parent))
    return dict(node), module, shown, path


def _origin(top: str) -> Path | None:
    """The file or the folder of a module, which is not imported; None if there is none."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the main script
        return None
    if spec is None or spec.origin is None:
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        return Path(folders[0]) if folders else None
    origin = Path(spec.origin).absolute()
    return origin.parent if origin.name == "__init__.py" else origin
