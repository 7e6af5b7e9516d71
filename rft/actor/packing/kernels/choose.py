"""Chooses the kernel of `strategy.attention` for a model; it is tested on the device before it is used."""

import logging
from typing import Any

from rft.actor.packing.kernels.base import AttentionKernel, AttentionNeeds
from rft.imports import import_part
from rft.strategy.attention import kernels_to_try
from rft.strategy.base import Strategy

KERNELS = {  # module and class; a run that tries a kernel imports it
    "flash": ("rows", "FlashKernel"),
    "varlen": ("rows", "VarlenKernel"),
    "flex": ("flex", "FlexKernel"),
    "sdpa": ("sdpa", "SdpaKernel"),
}
PLANNED = ("flash", "flex")


def make_kernel(name: str) -> AttentionKernel:
    """The kernel with a name of `KERNELS`."""
    kernel: AttentionKernel = _part(*KERNELS[name], name)()
    return kernel


def _part(module: str, name: str, attention: str) -> Any:
    return import_part(f"{__package__}.{module}", name, f"strategy.attention={attention}")


def choose_kernel(strategy: Strategy, needs: AttentionNeeds, key: str) -> AttentionKernel:
    """The first kernel that `strategy.attention` allows and that computes what the layers of a model need.

    In `mode=plan` the device of the run may be absent; a `PlannedKernel` of `rows.py` then stands for those that need
    it.

    Args:
        needs: of the model with this yaml key.

    Raises:
        ValueError: there is none; names the key.
    """
    absent = strategy.device_type != strategy.world.device.type
    reasons: list[str] = []
    for name in kernels_to_try(strategy.attention, strategy.device_type, strategy.dtype):
        kernel = _part("rows", "PlannedKernel", name)() if absent and name in PLANNED else make_kernel(name)
        reason = kernel.refuses(needs)
        if reason is None and not absent and name != "sdpa":
            test = _part("device_test", "device_error", name)
            reason = test(kernel, needs, strategy.world.device, strategy.dtype)
        if reason is None:
            if strategy.device_type == "cuda" and strategy.world.rank == 0:
                skipped = "".join(f"; {text}" for text in reasons)
                logging.getLogger(__name__).warning("%s: packed rows attend by %s%s", key, name, skipped)
            return kernel
        reasons.append(f"{name} cannot: {reason}")
    raise ValueError(
        f"strategy.attention={strategy.attention}, which the {key} cannot use ({'; '.join(reasons)}); set "
        "strategy.attention=auto"
    )
