"""Options of worker processes in the sandbox."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rft.ranges import PositiveInt, Range

Layer = Literal["namespaces", "network", "landlock", "seccomp"]


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
