"""Isolated worker processes for a reward term: no call harms the run, reads the machine, or changes another call.

Each worker is a program in the sandbox; see `rft.reward.sandbox.workers.worker`.
"""

import importlib.util
import json
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import rft
from rft.reward import REWARDS
from rft.reward.build import build_term
from rft.reward.call import CallOptions
from rft.reward.function import ground_truth
from rft.reward.runners import Outcomes, Rows, Runner
from rft.reward.sandbox.isolation.messages import framed
from rft.reward.sandbox.options import WorkerOptions
from rft.reward.sandbox.programs import Limits, SandboxOptions
from rft.reward.sandbox.sandbox import Sandbox, Spawned
from rft.reward.sandbox.workers.worker import LAST, WorkerSetup, decode
from rft.reward.term import Term
from rft.reward.thought import ReadingOptions
from rft.reward.workers import START_S, WorkerPool
from rft.sanitize import one_line
from rft.waits import waiting
from rft.worker.worker import Worker, WorkerLost

GRACE_S = 10.0  # a worker is ended that is silent for so long beyond the deadline of a job
END_S = 2.0  # for the sandbox to say how a worker ended
UNLIMITED = 10**9  # seconds; the deadline and the processor time of a worker are those of its jobs
LIBRARIES = ("site-packages", "dist-packages")
PROGRAM = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
sys.path += {path!r}
from rft.reward.sandbox.workers.worker import main
main()
"""


class IsolatedPool(WorkerPool):
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
        super().__init__(name, workers, deadline_s)
        node, module, shown, path = visible(node, key)
        self._setup = WorkerSetup(module, node, key, deadline_s, options.limits)
        self._program = PROGRAM.format(path=[*path, *options.packages])
        limits = Limits(**asdict(options.limits), seconds=UNLIMITED)
        self._limits = replace(limits, cpu_seconds=UNLIMITED, processes=limits.processes + 1)  # the worker itself
        sandboxed = SandboxOptions(options.require, workers, options.packages, replace(limits, seconds=START_S))
        self._sandbox = Sandbox(sandboxed, f"{key}.call.sandbox", shown=shown)
        self._stated: dict[str, Any] = {}  # by the worker that started last
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
                    self._idle.append(self._begin(self._started()).result())
            except WorkerLost as error:
                raise ValueError(str(error)) from error
            stated = self._stated
            try:
                reads = tuple(map(str, stated["reads"]))
                size = None if stated["rows_per_call"] is None else 1
                truth = bool(stated["needs_truth"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"{self._setup.key}: the worker states no facts of the term ({error!r})") from error
            self._facts = {"reads": reads, "rows_per_call": size, "needs_truth": truth}
        return self._facts

    def _start(self) -> Worker:
        line, other = socket.socketpair()
        try:
            with other:  # the worker closes stderr before it imports what it does not trust
                process = self._sandbox.spawn(self._program, self._limits, (other.fileno(), other.fileno(), 2))
        except (OSError, ValueError):
            line.close()
            raise
        return Worker(line, partial(_ended, process), self._limits.output_kib * 1024 + 1)

    async def _started(self) -> Worker:
        worker = await super()._started()
        try:
            self._stated = json.loads(await worker.call(framed(pickle.dumps(self._setup)), START_S))
            problem = self._stated.get("problem")
        except (ValueError, AttributeError, RecursionError) as error:
            problem = repr(error)
        if problem is not None:
            worker.end()
            raise WorkerLost("no_workers", one_line(str(problem)))
        return worker

    async def _exchange(self, worker: Worker, job: bytes) -> tuple[Any, bool]:
        answer = await worker.call(framed(job), self._setup.deadline_s + GRACE_S)
        return decode(answer[1:]), answer[:1] != LAST

    def close(self) -> None:
        """Ends the workers, and the fork server of the sandbox."""
        super().close()
        self._sandbox.close()


def _ended(process: Spawned, died: bool) -> WorkerLost:
    """Ends a worker and all its processes; says how it ended."""
    verdict = process.end(END_S if died else 0.0)
    said = f"{verdict['status']} {verdict['reason']}".strip()
    return WorkerLost("memory" if verdict["status"] == "memory" else "worker_died", f"the worker ended: {said}")


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
            self.state_as(self._rule)
            self.rows_per_call = self._rule.rows_per_call
        else:
            stated = pool.facts()
            self.reads, self.rows_per_call = stated["reads"], stated["rows_per_call"]
            self._needs_truth = stated["needs_truth"]

    def check(self) -> None:
        """Checks that the layers are available and that a worker can build the term."""
        self._pool.facts()

    def check_row(self, row: Mapping[str, Any]) -> None:
        if self._rule is not None:
            self._rule.check_row(row)
        if self._needs_truth:
            ground_truth(row)

    def values(self, responses: Sequence[str], rows: Rows) -> Outcomes:
        return self._pool.submit(responses, rows).result()

    def extract(self, response: str) -> str | None:
        return self._rule.extract(response) if self._rule is not None else None

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
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
    package = str(Path(rft.__file__).parent)
    shown, path = [package, *libraries], [str(Path(package).parent), *libraries]
    module = REWARDS.function(node["name"]).__module__ if "name" in node else None
    file, _, name = str(node.get("function", "")).rpartition(":")
    if file.endswith(".py"):
        function = Path(file).expanduser().resolve()
        if not function.is_file():
            raise ValueError(f"{key}.function={node['function']}: there is no such file")
        return {**node, "function": f"{function}:{name}"}, None, [*shown, str(function)], path
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


def isolated(
    name: str, node: Mapping[str, Any], key: str, options: CallOptions, reading: ReadingOptions
) -> tuple[Term, Runner]:
    """A term, and its workers. Arguments as in `rft.reward.call.build`."""
    assert options.deadline_s is not None, "a call in a sandbox has a deadline"
    pool = IsolatedPool(name, node, key, options.concurrency, options.deadline_s, options.sandbox)
    return IsolatedTerm(node, key, pool), pool
