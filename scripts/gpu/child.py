"""Runs one check in this process: python -m gpu.child <name> <folder> <out> <gpu or cpu>."""

import json
import shutil
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from gpu.checks import FailedError, Setting, TooFewGPUsError, all_checks


def main(name: str, folder: Path, out: Path, device: str) -> None:
    """Writes `found.json` into the folder: what was found, or the reason of a failure."""
    check = next(check for check in all_checks() if check.name == name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        told = {"status": "passed", **asdict(check.run(Setting(folder, out, device == "cpu")))}
    except FailedError as error:
        told = {"status": "failed", "reason": str(error)}
    except TooFewGPUsError as error:
        told = {"status": "needs a GPU", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  any error of a check is its result
        traceback.print_exc()
        told = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]}
    (folder / "found.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
