"""The fork server: a small process that forks a supervisor for each program, and the supervisor itself.

The trainer starts it with one end of a socket pair. A message on the socket is a job. Its four descriptors are a
control socket and the program's stdin, stdout and stderr. The supervisor reads the request from the control socket,
starts the program in namespaces of its own, and writes the verdict to the control socket, which the program does not
inherit.
"""

import _sitebuiltins
import builtins
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from . import kernel, landlock, program, seccomp, view
from .messages import read_message, write_message

PAUSE_S = 0.02  # between two measurements of memory
SETUP_S = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
PRELOADED = "bisect collections copy functools heapq io itertools json math operator queue random re string typing"
DESCRIPTORS = 4


def main() -> None:
    """Runs until the trainer ends, or the other end of its socket is closed; then runs a program in a child."""
    channel = int(sys.argv[2])
    options = json.loads(sys.argv[3])
    parent = os.getppid()
    for name in PRELOADED.split():
        __import__(name)
    paths = view.Paths(view.shown([*options["packages"], *options["shown"]]), view.parents(options["shown"]))
    problems = {layer: failure(probe) for layer, probe in PROBES.items()}
    layers = [layer for layer in options["layers"] if problems[layer] is None]
    proc = _proc()
    if "namespaces" in layers:
        try:
            view.enter(paths.shown, "network" in layers, proc)
        except OSError as error:
            problems["namespaces"] = [error.errno, str(error)]
    sys.path[:] = [os.path.dirname(os.__file__), f"{os.path.dirname(os.__file__)}/lib-dynload", *options["packages"]]
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # which -S leaves out
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")
    write_message(channel, json.dumps(problems).encode())
    if problems["namespaces"] is not None or "namespaces" not in layers:
        os._exit(1)
    gc.collect()
    gc.freeze()
    program.execute(serve(channel, parent, proc, layers, paths))


def failure(probe: Callable[[], None]) -> list[Any] | None:
    """The errno and the message with which a probe fails in a child of this process; None where it succeeds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            probe()
        except OSError as error:
            os.write(writer, json.dumps([error.errno, str(error)]).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if status != 0:
        return [0, f"the probe ended with the wait status {status}"]
    return json.loads(said) if said else None


def _proc() -> int:
    return os.open("/proc", os.O_PATH)


def _probe_namespaces() -> None:
    view.drop_root()
    view.own_user(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC, _proc())
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    view.work_folder(1, 10, view.BASE)


def _probe_network() -> None:
    view.drop_root()
    view.own_user(kernel.CLONE_NEWNET, _proc())


def _probe_landlock() -> None:
    kernel.no_new_privileges()
    landlock.restrict(["/"], [], ["/dev/null"])


def _probe_seccomp() -> None:
    kernel.no_new_privileges()
    seccomp.restrict()
    try:
        socket.socketpair()[0].close()
        socket.socket().close()
    except PermissionError:
        return
    raise OSError(0, "the filter is installed and socket() is allowed")


PROBES = {
    "namespaces": _probe_namespaces,
    "network": _probe_network,
    "landlock": _probe_landlock,
    "seccomp": _probe_seccomp,
}


def serve(channel: int, parent: int, proc: int, layers: list[str], paths: view.Paths) -> str:
    """Forks a supervisor for each job. Returns in the process of a program alone, with its text."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    jobs = socket.socket(fileno=channel)
    while True:
        if not ready.poll(1000):
            if os.getppid() != parent:
                os._exit(0)
            continue
        message, descriptors, _, _ = socket.recv_fds(jobs, 16, DESCRIPTORS)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            jobs.detach()
            os.close(channel)
            return supervise(descriptors[0], program.Streams(*descriptors[1:]), proc, layers, paths)
        for descriptor in descriptors:
            os.close(descriptor)


def supervise(control: int, streams: program.Streams, proc: int, layers: list[str], paths: view.Paths) -> str:
    """Starts a program and reports how it ends. Returns in the process of the program alone, with its text."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        request = json.loads(read_message(control))
        view.own_user(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC, proc)
        kernel.die_with_parent()
        view.write_proc("oom_score_adj", "1000", proc)  # the kernel kills programs before it kills the trainer
        reader, writer = os.pipe()
        init = os.fork()
        if init == 0:
            kernel.die_with_parent()
            os.close(control)
            os.close(reader)
            return program.become_init(request, streams, writer, layers, paths)
    except OSError as error:
        _answer(control, {"nonce": "", "status": "refused", "reason": str(error), "seconds": 0.0})
        os._exit(1)
    for descriptor in (writer, streams.stdin, streams.stdout, streams.stderr):
        os.close(descriptor)
    nonce = json.loads(read_message(control))  # after the fork: no memory of the program has it
    verdict = Watch(init, reader, control, proc, request).end()
    _answer(control, {"nonce": nonce, **verdict})
    os._exit(0)


def _answer(control: int, verdict: dict[str, Any]) -> None:
    write_message(control, json.dumps(verdict).encode())


class Watch:
    """Waits until a program ends, or ends it at a limit.

    Args:
        init: process 1 of the program's pid namespace.
        reader: the pipe with the messages of process 1 and of the program before it starts.
        control: the socket of the trainer; the trainer ends the program when it closes its side.
        proc: a descriptor of /proc.
        request: the limits.
    """

    def __init__(self, init: int, reader: int, control: int, proc: int, request: dict[str, Any]) -> None:
        self._init = init
        self._reader = reader
        self._control = control
        self._proc = proc
        self._seconds = request["seconds"]
        self._bytes = request["memory_mib"] << 20
        self._said = b""
        self._start = 0.0

    def end(self) -> dict[str, Any]:
        """The status, the reason and the seconds of the program; every process of its namespace has ended."""
        stopped = self._wait()
        seconds = time.monotonic() - self._start if self._start else 0.0
        os.kill(self._init, signal.SIGKILL)
        os.waitpid(self._init, 0)  # returns when the kernel has ended every process of the namespace
        status, reason = stopped or self._ended()
        return {"status": status, "reason": reason, "seconds": seconds}

    def _wait(self) -> tuple[str, str] | None:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        ready.register(self._control, select.POLLIN)
        deadline = time.monotonic() + SETUP_S
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                if not self._start:
                    return "refused", f"its namespaces were not made within {SETUP_S:g} seconds"
                return "timeout", ""
            events = ready.poll(1000 * min(left, PAUSE_S))
            for descriptor, _ in events:
                if descriptor == self._control:
                    return "output", ""
                part = os.read(self._reader, 4096)
                self._said += part
                if not part:
                    return None
                if not self._start and self._said.startswith(program.STARTED):
                    self._start = time.monotonic()
                    deadline = self._start + self._seconds
            if not events and self._start and self._memory(self._init) > self._bytes:
                return "memory", ""

    def _ended(self) -> tuple[str, str]:
        said = self._said.removeprefix(program.STARTED)
        if said.startswith(program.SETUP_FAILED):
            return "refused", said[1:].decode(errors="replace")
        if not said.startswith(program.ENDED):
            return ("killed", "process 1 was killed") if self._start else ("refused", "process 1 was killed")
        code = os.waitstatus_to_exitcode(int(said[1:]))
        if code < 0:
            status = "timeout" if -code == signal.SIGXCPU else "killed"
            return status, signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        if code == program.OUT_OF_MEMORY:
            return "memory", ""
        return ("ok", "") if code == 0 else ("error", f"exit status {code}")

    def _memory(self, process: int) -> int:
        """Bytes in the memory of a process and its descendants."""
        try:
            size = int(self._read(f"{process}/statm").split()[1]) * PAGE
            tasks = os.open(f"{process}/task", os.O_RDONLY, dir_fd=self._proc)
            try:
                threads = os.listdir(tasks)
            finally:
                os.close(tasks)
            for thread in threads:
                for child in self._read(f"{process}/task/{thread}/children").split():
                    size += self._memory(int(child))
        except (OSError, IndexError):  # it has ended
            return 0
        return size

    def _read(self, path: str) -> bytes:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(descriptor, 65536)
        finally:
            os.close(descriptor)
