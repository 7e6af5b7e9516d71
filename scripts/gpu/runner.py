"""Runs checks one after another, each in a process of its own with a time limit, and writes the report after each."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.checks import Check, all_checks
from gpu.page import write_page

TAIL = 400  # characters of the log of a process that ended without a result
BAD = ("failed", "not run")


def run(out: Path, cpu: bool, only: Sequence[str], seconds: float) -> int:
    """Runs the checks and returns the exit status.

    Args:
        out: folder of the report.
        cpu: runs those that need no GPU, at small sizes.
        only: beginnings of names; none: all checks.
        seconds: for all checks; those that do not begin in it are not run.

    Raises:
        SystemExit: no check has such a name.
    """
    checks = all_checks()
    if only:
        unknown = [name for name in only if not any(check.name.startswith(name) for check in checks)]
        if unknown:
            names = ", ".join(check.name for check in checks)
            raise SystemExit(f"--only {','.join(unknown)}: no check begins so; there are {names}")
        checks = [check for check in checks if check.name.startswith(tuple(only))]
    report: dict[str, Any] = {"device": "cpu" if cpu else "gpu", "results": []}
    shutil.rmtree(out / "work", ignore_errors=True)  # runs with which an earlier command compared, on another device
    ends = time.monotonic() + seconds
    for check in checks:
        if sys.stdout.isatty():
            say(f"{check.name:<20} ...\r")
        result = decide(check, out, cpu, ends - time.monotonic())
        report["results"].append(result)
        write(out, report)
        say(f"{check.name:<20} {result['status']}: {result['figure'] or result['reason']}\n")
    counts = {status: sum(r["status"] == status for r in report["results"]) for status in ("passed", *BAD)}
    say(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {out / 'report.html'}\n")
    return int(any(counts[status] for status in BAD))


def decide(check: Check, out: Path, cpu: bool, left: float) -> dict[str, Any]:
    """The result of a check, which runs if the device, its package and the time permit.

    Args:
        left: seconds left for all checks.
    """
    title = f"{check.title} (at small sizes)" if cpu else check.title
    result: dict[str, Any] = {"name": check.name, "title": title, "status": "", "figure": "", "reason": ""}
    result |= {"numbers": {}, "text": "", "seconds": 0.0}
    if check.cuda and cpu:
        return result | {"status": "needs a GPU", "reason": "--cpu"}
    if check.is_missing():
        return result | {"status": "not installed", "reason": f"the package {check.package}"}
    if left <= 0:
        return result | {"status": "not run", "reason": "the time of --seconds is over"}
    started = time.monotonic()
    result |= execute(check.name, out, cpu, min(check.seconds, left))
    return result | {"seconds": round(time.monotonic() - started, 1)}


def execute(name: str, out: Path, cpu: bool, limit: float) -> dict[str, Any]:
    """Runs a check in a process of its own, whose group is killed at the end or at the limit in seconds."""
    folder = out / "work" / name.replace(":", "_")
    log = out / "logs" / f"{folder.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (folder / "found.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpu.child", name, str(folder), str(out), "cpu" if cpu else "gpu"]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    with log.open("w") as stream:
        child = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(child)
    if status is None:
        return {"status": "failed", "reason": f"no result after {limit:.0f} s; {log}"}
    if status == 0 and (folder / "found.json").exists():
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return {"status": "failed", "reason": f"its process ended with {how}: {tail(log)}"}


def stop(child: subprocess.Popen[bytes]) -> None:
    """Kills the session of a process, with what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tail(log: Path) -> str:
    """The end of a log, in one line."""
    return " ".join(log.read_text(errors="replace").split())[-TAIL:] or "its log is empty"


def write(out: Path, report: dict[str, Any]) -> None:
    """Replaces report.json and report.html, so that a run that is cut leaves valid files."""
    partial = out / "report.json.partial"
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(out / "report.json")
    write_page(out, report)


def say(text: str) -> None:
    """Writes to the terminal at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
