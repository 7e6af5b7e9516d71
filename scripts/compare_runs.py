"""Checks that a change of the code changes no result: compares the same short runs of two checkouts.

python scripts/compare_runs.py list
python scripts/compare_runs.py record --checkout ../before --out before.json
python scripts/compare_runs.py record --checkout . --out after.json --only default,ppo
python scripts/compare_runs.py compare before.json after.json --only default,ppo

Runs of one process must be bit-equal, runs of several ranks equal to 1e-6. The values of the tensors are saved in a
folder next to the file: `before.tensors` for `before.json`.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from comparison.recording import Recorder
from comparison.runs import RUNS, chosen
from comparison.verdicts import compare, table


def main() -> None:
    """Runs the section that the command line names."""
    parser = argparse.ArgumentParser(description="Records short runs of a checkout, and compares two recordings.")
    sections = parser.add_subparsers(dest="section", required=True, metavar="section")
    part = sections.add_parser("list", help="prints the names of the runs")
    part.set_defaults(run=list_runs)
    part = sections.add_parser("record", help="runs the commands on a checkout and writes their numbers")
    part.add_argument("--checkout", type=Path, required=True, help="the root of the clone whose rft runs")
    part.add_argument("--out", type=Path, required=True, help="the json file to write")
    part.add_argument("--only", default="", help="comma-separated names of runs; the runs that they need are included")
    part.add_argument("--jobs", type=int, default=2, help="concurrent runs of one process (default: 2)")
    part.add_argument("--keep", type=Path, default=None, help="a folder in which to keep the output of the runs")
    part.set_defaults(run=record)
    part = sections.add_parser("compare", help="prints a table of two recordings; exits with 1 if a run failed")
    part.add_argument("one", type=Path)
    part.add_argument("other", type=Path)
    part.add_argument("--only", default="", help="comma-separated names of runs; others are skipped")
    part.set_defaults(run=compare_recordings)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


def list_runs(_: argparse.Namespace) -> None:
    """Prints a line for every run."""
    for run in RUNS:
        sys.stdout.write(f"{run.name}: {run.ranks} rank{'s' * (run.ranks > 1)}\n")


def record(arguments: argparse.Namespace) -> None:
    """Writes a recording. Its tensors replace those of an earlier recording of this name."""
    out: Path = arguments.out.resolve()
    tensors = tensors_of(out)
    runs = chosen([name for name in arguments.only.split(",") if name])
    shutil.rmtree(tensors, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="rft-compare-") as temporary:
        folder = Path(temporary).resolve() if arguments.keep is None else arguments.keep.resolve()
        recorder = Recorder(arguments.checkout.resolve(), folder, tensors)
        recording = recorder.record_all(runs, arguments.jobs, say)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(recording, indent=1) + "\n")
    if recording["failed"]:
        raise RuntimeError(f"{', '.join(recording['failed'])} failed; {out} has the other runs")


def say(text: str) -> None:
    """Prints a line and flushes it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def compare_recordings(arguments: argparse.Namespace) -> None:
    """Prints the table, and exits with status 1 if a run failed."""
    one, other = (json.loads(path.read_text()) for path in (arguments.one, arguments.other))
    say(f"first: {one['checkout']} at {one['commit']}, torch {one['torch']}")
    say(f"second: {other['checkout']} at {other['commit']}, torch {other['torch']}\n")
    if only := [name for name in arguments.only.split(",") if name]:
        for side in (one, other):
            side["runs"] = {name: side["runs"][name] for name in only if name in side["runs"]}
    verdicts = compare(one, other, (tensors_of(arguments.one), tensors_of(arguments.other)))
    sys.stdout.write(table(verdicts))
    if any(verdict.problems for verdict in verdicts):
        raise SystemExit(1)


def tensors_of(path: Path) -> Path:
    """Returns the folder with the values of a recording's tensors."""
    return path.with_suffix(".tensors")


if __name__ == "__main__":
    main()
