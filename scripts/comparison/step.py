"""Runs the main program and writes which functions under `rft/` its second step enters.

python step.py CHECKOUT OUT.json OVERRIDE...

A step begins when a method `next` of a class whose name ends with `Source` is called. Python's profile hook observes
the call, so the program is not changed, and its modules may have any names. Comprehensions and lambdas are separate
functions in Python; their names end with `>`.
"""

import json
import runpy
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MEASURED = 2  # the step that is written; the first step also initializes caches and state


class Marker:
    """The profile hook.

    Args:
        package: only functions of files in this folder are recorded.
    """

    def __init__(self, package: Path) -> None:
        self.package = f"{package}/"
        self.step = 0
        self.source: FrameType | None = None  # frame of the active `next`; nested calls of `next` do not start a step
        self.entered: dict[int, set[CodeType]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Records the call of a function, and the return of the call that began a step."""
        code = frame.f_code
        if not code.co_filename.startswith(self.package):
            return
        if event == "return" and frame is self.source:
            self.source = None
        elif event == "call":
            owner = code.co_qualname.rpartition(".")[0]
            if code.co_name == "next" and owner.endswith("Source") and self.source is None:
                self.step += 1
                self.source = frame
            self.entered.setdefault(self.step, set()).add(code)


def main() -> None:
    """Runs the program under the hook and writes the functions as `file:line name`."""
    root, out, overrides = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    marker = Marker(root / "rft")
    sys.path[0] = str(root)  # replaces this script's folder
    sys.argv = ["rft.main", *overrides]
    threading.setprofile(marker)
    sys.setprofile(marker)
    try:
        runpy.run_module("rft.main", run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
    assert marker.step > MEASURED, f"only {marker.step} steps were seen"
    codes = marker.entered[MEASURED]
    functions = {
        (str(Path(code.co_filename).relative_to(root)), code.co_firstlineno, code.co_qualname) for code in codes
    }
    out.write_text(json.dumps([f"{path}:{line} {name}" for path, line, name in sorted(functions)]))


if __name__ == "__main__":
    main()
