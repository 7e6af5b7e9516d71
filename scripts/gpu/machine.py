"""The machine."""

import importlib.metadata
import os
import platform
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting

PACKAGES = (
    "torch",
    "transformers",
    "tensordict",
    "hydra-core",
    "triton",
    "flash-attn",
    "liger-kernel",
    "torchao",
    "vllm",
    "sglang",
)


def checks() -> list[Check]:
    """The checks of this file."""
    return [Check("machine", "versions and devices", machine, rank=0, seconds=120)]


def machine(setting: Setting) -> Found:
    """Versions of the packages, and the GPU."""
    import torch

    numbers: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            numbers[package] = None
    if not setting.cpu:
        if not torch.cuda.is_available():
            raise FailedError("torch finds no CUDA device; --cpu runs what a CPU can")
        facts = torch.cuda.get_device_properties(0)
        numbers |= {"gpu": facts.name, "gpus": torch.cuda.device_count(), "memory_gib": facts.total_memory / 2**30}
    device = "CPU" if setting.cpu else f"{numbers['gpu']}, {numbers['memory_gib']:.1f} GiB"
    versions = f"torch {numbers['torch']}, transformers {numbers['transformers']}"
    return Found(f"{device}; Python {numbers['python']}, {versions}", numbers)
