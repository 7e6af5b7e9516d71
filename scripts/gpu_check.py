"""Checks on this machine what a GPU alone can show, and measures the speed and the memory of updates.

python scripts/gpu_check.py                       # everything, half an hour in all on one H100
python scripts/gpu_check.py --only attention,sft  # the checks whose names begin so
python scripts/gpu_check.py --cpu                 # what a CPU can run, at small sizes

Writes report.json after every check, and report.html, into --out. Each check has a process of its own. The machine
needs torch and transformers; all other packages may be wheels, which scripts/pack_gpu_check.sh collects in gpu_wheels/.
"""

import argparse
import importlib.metadata
import os
import sys
import zipfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent


def main() -> int:
    """Runs the checks; the exit status is 1 if one failed or did not run."""
    parser = argparse.ArgumentParser(description="Checks rft on a GPU.")
    parser.add_argument("--cpu", action="store_true", help="runs what a CPU can, at small sizes")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="folder of the report")
    parser.add_argument("--only", default="", metavar="NAMES", help="names of checks, or how they begin: attention,sft")
    parser.add_argument("--seconds", type=float, default=1800.0, metavar="LIMIT", help="for all checks (default: 1800)")
    parser.add_argument(
        "--wheels", type=Path, default=SCRIPTS.parent / "gpu_wheels", help="wheels of packages that are not installed"
    )
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(SCRIPTS), str(SCRIPTS.parent)]
    if arguments.wheels.is_dir():
        unpack_wheels(arguments.wheels, out / "packages")
        paths.append(str(out / "packages"))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    from gpu.runner import run

    return run(out, arguments.cpu, [name for name in arguments.only.split(",") if name], arguments.seconds)


def unpack_wheels(wheels: Path, folder: Path) -> None:
    """Unpacks the wheels of packages that are not installed into a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            importlib.metadata.version(wheel.name.split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


if __name__ == "__main__":
    sys.exit(main())
