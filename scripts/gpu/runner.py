"""Runs checks in a process that they share, starts it again behind a check that ends it, and writes the report."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu.checks import Check, all_checks
from gpu.page import write_page

TAIL = 400  # characters of the log of a process that ended without a result
BAD = ("failed", "not run")
POLL_S = 0.1


def run(out: Path, cpu: bool, only: Sequence[str], first: str, minutes: float) -> int:
    """Runs the checks and returns the exit status.

    Args:
        out: folder of the report: report.json, report.html, results.jsonl and log.txt.
        cpu: runs those that need no GPU, at small sizes.
        only: beginnings of names; none: all checks.
        first: the beginning of the name of the first one; empty: all.
        minutes: for all checks; one that takes longer than what is left is not run.

    Raises:
        SystemExit: no check has such a name.
    """
    checks = chosen(all_checks(), only, first)
    report: dict[str, Any] = {"device": "cpu" if cpu else "gpu", "results": []}
    say_plan(checks, cpu, 60 * minutes)
    for name in ("results.jsonl", "log.txt"):
        (out / name).unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    runs = Runs(out, work, cpu, time.monotonic() + 60 * minutes)
    try:
        for result in runs.results(checks):
            report["results"].append(result)
            write(out, report)
            say(f"{result['name']:<20} {result['status']}: {result['figure'] or result['reason']}\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    counts = {status: sum(r["status"] == status for r in report["results"]) for status in ("passed", *BAD)}
    say(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {out / 'report.html'}\n")
    return int(any(counts[status] for status in BAD))


def chosen(checks: list[Check], only: Sequence[str], first: str) -> list[Check]:
    """The checks whose names begin so, from the first one on. Raises SystemExit if a name is unknown."""
    for option, names in (("--only", only), ("--from", [first] if first else [])):
        unknown = [name for name in names if not any(check.name.startswith(name) for check in checks)]
        if unknown:
            known = ", ".join(check.name for check in checks)
            raise SystemExit(f"{option} {','.join(unknown)}: no check begins so; there are {known}")
    start = next(number for number, check in enumerate(checks) if check.name.startswith(first))
    return [check for check in checks[start:] if not only or check.name.startswith(tuple(only))]


def say_plan(checks: Sequence[Check], cpu: bool, seconds: float) -> None:
    """Prints each check that can run here with its estimate and the sum, on a GPU."""
    if cpu:
        return
    total = 0.0
    for check in checks:
        if not check.refusal(cpu):
            total += check.seconds
            late = "" if total <= seconds else "  not within --minutes"
            say(f"{check.name:<20} {check.seconds:5.0f} s {total:6.0f} s  {check.title}{late}\n")
    say(f"{'':<20} {'':7} {total:6.0f} s in all, of {seconds:.0f}\n")


class Runs:
    """Processes that run checks.

    Args:
        out: folder of the results and of the log.
        work: folder of what checks write.
        cpu: hides GPUs from them.
        ends: when all are killed, by `time.monotonic`.
    """

    def __init__(self, out: Path, work: Path, cpu: bool, ends: float) -> None:
        self._results, self._log = out / "results.jsonl", out / "log.txt"
        self._work = work
        self._cpu = cpu
        self._ends = ends
        self._read = 0  # bytes of the results

    def results(self, checks: Sequence[Check]) -> Iterator[dict[str, Any]]:
        """The result of every check, as soon as it is known."""
        left = list(checks)
        while left:
            if refused := left[0].refusal(self._cpu):
                yield empty_result(left.pop(0), self._cpu) | refused
                continue
            together = [check for check in left if not check.refusal(self._cpu)]
            for name, told in self._together(together):
                while left[0].name != name:  # those that cannot run here
                    yield empty_result(left[0], self._cpu) | left.pop(0).refusal(self._cpu)
                yield empty_result(left.pop(0), self._cpu) | told

    def _together(self, checks: Sequence[Check]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and results of checks that one process runs, up to the check that ends it."""
        limits = {check.name: check.limit for check in checks}
        done, running, began = 0, "", time.monotonic()
        size = self._log.stat().st_size if self._log.exists() else 0
        child = self._start([check.name for check in checks])
        try:
            while True:
                ended = child.poll() is not None
                for line in self._new_lines():
                    name = line.pop("name")
                    if line:
                        yield name, line
                        done, running = done + 1, ""
                    else:
                        running, began = name, time.monotonic()
                        say(f"{running:<20} ...\r" if sys.stdout.isatty() else "")
                if ended:
                    break
                waited = time.monotonic() - began
                limit = min(limits.get(running, 60.0), self._ends + 5 - began)
                if waited > limit:
                    stop(child)
                    why = f"no result after {waited:.0f} s; its process was killed"
                    yield running or checks[done].name, {"status": "failed", "reason": why, "seconds": round(waited, 1)}
                    return
                time.sleep(POLL_S)
        finally:
            stop(child)
        if done < len(checks) and (running or not done):
            how = f"signal {signal.Signals(-child.returncode).name}" if child.returncode < 0 else ""
            why = f"its process ended with {how or f'status {child.returncode}'}: {tail(self._log, size)}"
            yield running or checks[done].name, {"status": "failed", "reason": why}

    def _start(self, names: list[str]) -> subprocess.Popen[bytes]:
        device, seconds = "cpu" if self._cpu else "gpu", max(0.0, self._ends - time.monotonic())
        command = [sys.executable, "-m", "gpu.child", str(self._results), str(self._work), device, f"{seconds:.1f}"]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if self._cpu else {})
        with self._log.open("a") as stream:
            return subprocess.Popen(
                [*command, *names], stdout=stream, stderr=subprocess.STDOUT, env=environment, process_group=0
            )

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were added to the results."""
        if not self._results.exists():
            return
        with self._results.open("rb") as stream:
            stream.seek(self._read)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(json.loads, whole.splitlines())


def empty_result(check: Check, cpu: bool) -> dict[str, Any]:
    """The result of a check without what it found."""
    title = f"{check.title} (at small sizes)" if cpu else check.title
    result: dict[str, Any] = {"name": check.name, "title": title, "status": "", "figure": "", "reason": ""}
    return result | {"numbers": {}, "text": "", "seconds": 0.0}


def stop(child: subprocess.Popen[bytes]) -> None:
    """Kills the group of a process, with what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tail(log: Path, start: int) -> str:
    """The end of what was added to a log behind a place, in one line."""
    return " ".join(log.read_bytes()[start:].decode(errors="replace").split())[-TAIL:] or "its log is empty"


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
