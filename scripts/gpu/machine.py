"""The machine: versions, and how fast it multiplies and copies."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from functools import partial
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
SIZES = {True: 256, False: 8192}  # rows and columns of matrices, by whether it runs on a CPU
BYTES = {True: 2**22, False: 2**31}  # that are copied
REPEATS = 5


def checks() -> list[Check]:
    """The checks of this file."""
    return [
        Check("machine", "versions and devices", machine, rank=0, seconds=12),
        Check("products", "products of matrices and copies", products, rank=1, seconds=6),
    ]


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
        numbers["cudnn"] = torch.backends.cudnn.version()
    device = "CPU" if setting.cpu else f"{numbers['gpu']}, {numbers['memory_gib']:.1f} GiB"
    versions = f"torch {numbers['torch']}, transformers {numbers['transformers']}"
    return Found(f"{device}; Python {numbers['python']}, {versions}", numbers)


def products(setting: Setting) -> Found:
    """TFLOPS of the product of two square matrices in three formats, and GB/s of copies."""
    import torch

    from rft.actor.forward.logits import float32_products
    from rft.batch.device import to_host

    size, device = SIZES[setting.cpu], "cpu" if setting.cpu else "cuda"
    numbers: dict[str, Any] = {}
    ways = {"bf16": (torch.bfloat16, "highest"), "fp32": (torch.float32, "highest"), "tf32": (torch.float32, "high")}
    for name, (dtype, precision) in ways.items():
        one = torch.randn(size, size, device=device, dtype=dtype)
        with float32_products(precision):
            numbers[f"tflops_{name}"] = 2 * size**3 / fastest(partial(torch.mm, one, one), setting) / 1e12
    data = torch.zeros(BYTES[setting.cpu], dtype=torch.uint8, device=device)
    target = torch.empty_like(data)
    numbers["gb_per_s"] = 2 * data.numel() / fastest(lambda: target.copy_(data), setting) / 1e9  # reads and writes
    host = torch.zeros(data.numel() // 4, dtype=torch.uint8, pin_memory=not setting.cpu)
    seconds = fastest(lambda: target[: host.numel()].copy_(host, non_blocking=True), setting)
    numbers["gb_per_s_from_host"] = host.numel() / seconds / 1e9
    for name, pinned in {"pinned": True, "pageable": False}.items():
        seconds = fastest(partial(to_host, data[: host.numel()], pinned), setting)
        numbers[f"gb_per_s_to_{name}"] = host.numel() / seconds / 1e9
    parts = [f"{name} {numbers[f'tflops_{name}']:.4g} TFLOPS" for name in ways]
    copies = f"copies {numbers['gb_per_s']:,.0f} GB/s, from the host {numbers['gb_per_s_from_host']:.0f} GB/s"
    copies += f", to the host {numbers['gb_per_s_to_pinned']:.0f} (pageable {numbers['gb_per_s_to_pageable']:.0f}) GB/s"
    return Found(f"{', '.join(parts)}; {copies}", numbers)


def fastest(work: Callable[[], Any], setting: Setting, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    seconds = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        work()
        wait(setting)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def wait(setting: Setting) -> None:
    """Waits for the device."""
    import torch

    if not setting.cpu:
        torch.cuda.synchronize()
