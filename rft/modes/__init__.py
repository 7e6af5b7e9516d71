"""The modes of a run, named by `mode=`. Each is a function `(config, console) -> float` in its own module."""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console

from rft.imports import import_part

Mode = Callable[[dict[str, Any], Console], float]  # (resolved config, console of rank zero) -> what main returns

MODES = {  # module and function; the module is imported when the command names the mode
    "train": ("rft.modes.train", "train"),
    "verify": ("rft.modes.verify", "verify"),
    "plan": ("rft.modes.plan.report", "plan_run"),
    "doctor": ("rft.modes.doctor.run", "run"),
    "replay": ("rft.modes.replay.run", "replay"),
    "inspect": ("rft.modes.inspect", "inspect"),
    "serve": ("rft.modes.serve.run", "serve"),
    "evaluate": ("rft.modes.evaluate", "evaluate"),
    "generate": ("rft.modes.generate", "generate"),
    "chat": ("rft.modes.chat", "chat"),
}


def find_mode(name: object) -> Mode:
    """The function of a mode. An unknown name gives `train`, which reports it with all mistakes of the config.

    The first call in a process imports torch and transformers: some 600,000 objects, which stay. It disables garbage
    collection meanwhile, and excludes them from later collections (`gc.freeze`). Other calls must not do so: garbage
    of the job before, in a sweep, would never be freed.

    Raises:
        ValueError: the mode has been taken out.
    """
    place = MODES[name] if isinstance(name, str) and name in MODES else MODES["train"]
    load = partial(import_part, *place, f"mode={name}")
    if "torch" not in sys.modules:
        enabled = gc.isenabled()
        gc.disable()
        try:
            load()
        finally:
            if enabled:
                gc.enable()
        gc.freeze()
    mode: Mode = load()
    return mode
