"""Options and limits of programs in the sandbox, and how a program ended."""

from dataclasses import dataclass
from typing import Literal

from rft.ranges import PositiveInt, Seconds
from rft.reward.sandbox.options import CallLimits, Layer

Status = Literal["ok", "error", "timeout", "memory", "output", "killed", "refused"]


@dataclass(frozen=True)
class Limits(CallLimits):
    """Limits of one run of a program: those of a call, and more.

    Attributes:
        output_kib: of stdout, and of stderr.
        seconds: of real time, from the start of the program's execution.
    """

    seconds: Seconds


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
