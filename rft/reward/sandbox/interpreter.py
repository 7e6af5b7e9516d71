"""A Python interpreter as a tool: an environment whose programs run in the sandbox."""

import json
import threading
from dataclasses import asdict
from functools import cache
from typing import Any

from rft.reward.sandbox.programs import Limits, Outcome, SandboxOptions
from rft.reward.sandbox.sandbox import Sandbox


@cache
def _shared(options: str) -> tuple[Sandbox, threading.Semaphore]:
    """The sandbox of all interpreters of this process with these options, as JSON; checked. And its free workers."""
    nodes = json.loads(options)
    sandbox = Sandbox(SandboxOptions(**nodes | {"limits": Limits(**nodes["limits"])}))
    sandbox.check()
    return sandbox, threading.Semaphore(sandbox.options.workers)


class Python:
    """An environment with a Python interpreter. Each call is a program of its own: names and files do not stay.

    Args:
        prelude: Python source in front of every program, such as imports.
        sandbox: how programs are isolated, and their limits.

    Raises:
        ValueError: this machine cannot isolate programs as `sandbox` wants.
    """

    def __init__(self, *, prelude: str, sandbox: SandboxOptions) -> None:
        self._prelude = f"{prelude}\n" if prelude else ""
        self._seconds = sandbox.limits.seconds
        self._sandbox, self._workers = _shared(json.dumps(asdict(sandbox)))

    def reset(self, **row: Any) -> None:
        """Adds nothing to the prompt."""

    def code_interpreter(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the whole program; nothing of earlier ones is left.
        """
        with self._workers:
            outcome = self._sandbox.run(self._prelude + code, "")
        if outcome.status == "refused":
            raise RuntimeError(outcome.reason)
        return self._shown(outcome)

    def _shown(self, outcome: Outcome) -> str:
        """What the program printed, and why it ended early."""
        ends = {
            "ok": "",
            "error": outcome.stderr,
            "timeout": f"the program ran longer than {self._seconds:g} seconds, or than its limit of processor time",
            "memory": "the program used too much memory",
            "output": "the program printed too much",
            "killed": f"the program was ended by {outcome.reason}",
        }
        return "\n".join(part.rstrip("\n") for part in (outcome.stdout, ends[outcome.status]) if part)
