"""The modes of a run: what `mode=` names. A mode is a function `(config, console) -> float` in a module of its own."""

import importlib
from collections.abc import Callable
from typing import Any

from rich.console import Console

Mode = Callable[[dict[str, Any], Console], float]  # (resolved config, console of rank zero) -> what main returns

MODES = {  # the module of each, imported when the command names the mode, and its function
    "train": ("rft.modes.train", "train"),
    "verify": ("rft.modes.verify", "verify"),
    "plan": ("rft.modes.plan.command", "plan_run"),
    "doctor": ("rft.modes.doctor.run", "run"),
    "inspect": ("rft.modes.inspect", "inspect"),
    "serve": ("rft.modes.serve", "serve"),
    "evaluate": ("rft.modes.evaluate", "evaluate"),
    "generate": ("rft.modes.generate", "generate"),
    "chat": ("rft.modes.chat", "chat"),
}


def find_mode(name: object) -> Mode:
    """The function of a mode. An unknown name is that of `train`, which reports it with all mistakes of the config."""
    module, function = MODES[name] if isinstance(name, str) and name in MODES else MODES["train"]
    mode: Mode = vars(importlib.import_module(module))[function]
    return mode
