"""Runs checks one after another in this process: python -m gpu.child <results> <work> <gpu or cpu> <seconds> <name>...

Writes a line of JSON to the file of results when a check begins, and one when it has ended.
"""

import ctypes
import gc
import json
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.checks import Check, FailedError, Setting, TooFewGPUsError, all_checks, importable

PR_SET_PDEATHSIG = 1
BROKEN = 3  # exit status: no other check can use the device in this process


def main(results: Path, work: Path, device: str, seconds: float, names: list[str]) -> None:
    """Runs the checks for which so many seconds are enough."""
    checks = {check.name: check for check in all_checks()}
    ends, shared = time.monotonic() + seconds, dict[str, Any]()
    with results.open("a") as stream:

        def tell(**line: Any) -> None:
            stream.write(json.dumps(line) + "\n")
            stream.flush()

        for name in names:
            check = checks[name]
            tell(name=name)
            started = time.monotonic()
            if ends - started < check.seconds and device != "cpu":
                left = f"{max(0, ends - started):.0f} s are left of --minutes, and it takes about {check.seconds:.0f}"
                told: dict[str, Any] = {"status": "not run", "reason": left}
            else:
                folder = work / name.replace(":", "_")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                told = run(check, Setting(folder, device == "cpu", shared))
            tell(name=name, seconds=round(time.monotonic() - started, 1), **told)
            if told["status"] == "failed" and is_broken(device):
                sys.exit(BROKEN)


def run(check: Check, setting: Setting) -> dict[str, Any]:
    """What a check found, or the reason of its failure."""
    try:
        with importable(check.package):
            return {"status": "passed", **asdict(check.run(setting))}
    except FailedError as error:
        return {"status": "failed", "reason": str(error)}
    except TooFewGPUsError as error:
        return {"status": "needs a GPU", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  any error of a check is its result
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]}


def is_broken(device: str) -> bool:
    """Whether the device answers no more, as after an illegal access; else the memory of a failed check is freed."""
    if device == "cpu":
        return False
    import torch

    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no check outlives a command that was killed
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5:])
