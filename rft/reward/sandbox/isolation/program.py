"""The process of one program, and the process 1 of its pid namespace, whose end kills all others."""

import os
import resource
import sys
import types
from dataclasses import dataclass
from typing import Any

from . import kernel, landlock, seccomp, view

STARTED, SETUP_FAILED, ENDED = b"S", b"F", b"E"  # the first byte of each message to the supervisor
OUT_OF_MEMORY = 86  # exit status of a program with an uncaught MemoryError
NAME = "program.py"


@dataclass
class Streams:
    """Descriptors of the pipes of one program."""

    stdin: int
    stdout: int
    stderr: int


def become_init(request: dict[str, Any], streams: Streams, status: int, layers: list[str], paths: view.Paths) -> str:
    """Restricts this process, which is process 1 of a pid namespace, and starts the program in a child.

    Args:
        request: the limits and the text of the program.
        status: a pipe to the supervisor, which the program does not inherit.
        layers: those in force.
        paths: what the program may read.

    Returns:
        In the process of the program alone, its text. Process 1 waits for the program and exits.
    """
    try:
        os.setsid()
        view.work_folder(request["files_mib"], request["files"])
        os.chdir(view.WORK)
        kernel.drop_capabilities()
        kernel.no_new_privileges()
        kernel.prctl("DUMPABLE", kernel.PR_SET_DUMPABLE, 0)
        if "landlock" in layers:
            landlock.restrict([*paths.shown, *view.DEVICES], paths.listed, [view.WORK, "/dev/null"])
        if "seccomp" in layers:
            seccomp.restrict()
        _limit(resource.RLIMIT_NPROC, request["processes"] + 2)  # the supervisor and process 1 count too
        program = os.fork()
    except OSError as error:
        os.write(status, SETUP_FAILED + str(error).encode())
        os._exit(1)
    if program:
        for descriptor in (streams.stdin, streams.stdout, streams.stderr):
            os.close(descriptor)
        os.write(status, ENDED + str(_reap(program)).encode())
        os._exit(0)
    try:
        _prepare(request, streams)
        _limit(resource.RLIMIT_NOFILE, request["open_files"])
        os.write(status, STARTED)
    except OSError as error:
        os.write(status, SETUP_FAILED + str(error).encode())
        os._exit(1)
    os.closerange(3, 1 << 30)
    return str(request["program"])


def execute(text: str) -> None:
    """Runs a program as `__main__`; its errors end this process as those of a script do."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = [NAME]
    sys.set_int_max_str_digits(0)  # print(10**5000) is no error; the limit of processor time holds
    try:
        exec(compile(text, NAME, "exec"), module.__dict__)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def _reap(program: int) -> int:
    """Waits for every child until the program has ended; returns its wait status."""
    while True:
        ended, status = os.wait()
        if ended == program:
            return status


def _prepare(request: dict[str, Any], streams: Streams) -> None:
    os.setsid()
    for number, descriptor in enumerate((streams.stdin, streams.stdout, streams.stderr)):
        os.dup2(descriptor, number)
    text = {"encoding": "utf-8", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **text)  # type: ignore[call-overload, misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **text)  # type: ignore[call-overload, misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", **text)  # type: ignore[call-overload, misc]  # noqa: SIM115
    os.environ.clear()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, request["memory_mib"] << 20)
    _limit(resource.RLIMIT_FSIZE, request["files_mib"] << 20)
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 1))
