"""Checks on this machine what a GPU alone can show, and measures the speed and the memory of updates.

python scripts/gpu_check.py                       # the most valuable checks, eight minutes on one H200
python scripts/gpu_check.py --from compile        # those from there on
python scripts/gpu_check.py --only kernel,sft     # the checks whose names begin so
python scripts/gpu_check.py --cpu                 # what a CPU can run, at small sizes

Prints the plan, runs the checks in one process, and writes report.json, report.html and results.jsonl into --out after
every check. A check that ends the process or takes too long fails, and another process runs those behind it. The
machine needs torch and transformers; all other packages may be wheels, which scripts/pack_gpu_check.sh collects in
gpu_wheels/.
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
import zipfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
APART = ("torchao",)  # transformers imports it wherever it is installed, so it is for the checks that need it alone


def main() -> int:
    """Runs the checks; the exit status is 1 if one failed or did not run."""
    parser = argparse.ArgumentParser(description="Checks rft on a GPU.")
    parser.add_argument("--cpu", action="store_true", help="runs what a CPU can, at small sizes")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="folder of the report")
    parser.add_argument("--only", default="", metavar="NAMES", help="names of checks, or how they begin: kernel,sft")
    parser.add_argument("--from", default="", dest="first", metavar="NAME", help="the first check, or how it begins")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks (default: 8)")
    parser.add_argument(
        "--wheels", type=Path, default=SCRIPTS.parent / "gpu_wheels", help="wheels of packages that are not installed"
    )
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_packages_") as packages:
        paths = [str(SCRIPTS), str(SCRIPTS.parent)]
        if arguments.wheels.is_dir():
            unpack_wheels(arguments.wheels, Path(packages))
            paths.append(str(Path(packages) / "all"))
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        from gpu.checks import APART_VARIABLE
        from gpu.runner import run

        os.environ[APART_VARIABLE] = str(Path(packages) / "apart")
        only = [name for name in arguments.only.split(",") if name]
        return run(out, arguments.cpu, only, arguments.first, arguments.minutes)


def unpack_wheels(wheels: Path, folder: Path) -> None:
    """Unpacks the wheels of what is not installed: packages of `APART` into `apart/<name>`, all others into `all`."""
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / (f"apart/{name}" if name in APART else "all"))


if __name__ == "__main__":
    sys.exit(main())
