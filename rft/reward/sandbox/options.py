"""Options of the sandbox, limits of a program, and how it ended."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rft.ranges import PositiveInt, Range, Seconds

Layer = Literal["namespaces", "network", "landlock", "seccomp"]
Status = Literal["ok", "error", "timeout", "memory", "output", "killed", "refused"]


@dataclass(frozen=True)
class CallLimits:
    """Limits of one call of a function.

    Attributes:
        cpu_seconds: of processor time of each process.
        memory_mib: of each process's address space, and of the memory of all its processes together.
        processes: at the same time, threads included.
        files_mib: of all files of the working folder, which is in memory.
        files: in the working folder, folders included.
        open_files: of each process.
        output_kib: of the value that it returns, as JSON.
    """

    cpu_seconds: PositiveInt
    memory_mib: Annotated[int, Range(low=64, high=1_000_000)]
    processes: Annotated[int, Range(low=1, high=10_000)]
    files_mib: Annotated[int, Range(low=1, high=1_000_000)]
    files: Annotated[int, Range(low=4, high=10_000_000)]
    open_files: Annotated[int, Range(low=16, high=1_000_000)]
    output_kib: Annotated[int, Range(low=1, high=1_000_000)]


@dataclass(frozen=True)
class Limits(CallLimits):
    """Limits of one run of a program: those of a call, and more.

    Attributes:
        output_kib: of stdout, and of stderr.
        seconds: of real time, from the start of the program's execution.
    """

    seconds: Seconds


@dataclass(frozen=True)
class WorkerOptions:
    """How the worker processes of a reward term are isolated.

    Attributes:
        require: layers without which no worker runs; `namespaces` is always one of them.
        packages: folders with Python packages that the function may import, beside those of the environment.
        limits: of each call.
    """

    require: list[Layer]
    packages: list[str]
    limits: CallLimits


@dataclass(frozen=True)
class SandboxOptions:
    """How programs are isolated.

    Attributes:
        require: layers without which no program runs; `namespaces` is always one of them.
        workers: programs that run at the same time.
        packages: folders with Python packages that programs may import.
        limits: of each program.
    """

    require: list[Layer]
    workers: PositiveInt
    packages: list[str]
    limits: Limits


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: `ok`, exit status 0; `error`, another exit status; `timeout`, `memory` or `output`, a limit; `killed`, a
            signal; `refused`, the sandbox could not run it, which says nothing about the program.
        stdout, stderr: text, with the replacement character for bytes that are not UTF-8, truncated at the limit.
        seconds: of real time, from the start of its execution.
        reason: the exit status, the signal, or why the sandbox refused it.
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
    reason: str
