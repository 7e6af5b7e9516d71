"""The machine, and memory that two processes share on a GPU."""

import importlib.metadata
import os
import platform
import time
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
SHARED_BYTES = 2**28


def checks() -> list[Check]:
    """The checks of this file."""
    return [
        Check("machine", "versions and devices", machine, rank=0, seconds=120),
        Check("cuda_ipc", "a process writes into the memory of another", cuda_ipc, rank=70, seconds=120, cuda=True),
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
    device = "CPU" if setting.cpu else f"{numbers['gpu']}, {numbers['memory_gib']:.1f} GiB"
    versions = f"torch {numbers['torch']}, transformers {numbers['transformers']}"
    return Found(f"{device}; Python {numbers['python']}, {versions}", numbers)


def cuda_ipc(setting: Setting) -> Found:
    """A tensor on the GPU goes to a second process by its handle; what that one writes is seen here."""
    import torch
    from torch import multiprocessing

    context = multiprocessing.get_context("spawn")
    tensors, seconds = context.Queue(), context.Queue()
    tensor = torch.zeros(SHARED_BYTES // 4, device="cuda")
    process = context.Process(target=fill_shared, args=(tensors, seconds))
    process.start()
    tensors.put(tensor)
    took = seconds.get(timeout=100)
    expected = torch.arange(tensor.numel(), device="cuda", dtype=tensor.dtype)
    if not torch.equal(tensor, expected):
        raise FailedError("the values that the second process wrote are not seen in the first")
    tensors.put(None)
    process.join(10)
    rate = SHARED_BYTES / 1e9 / took
    return Found(f"256 MiB written by a second process at {rate:.0f} GB/s", {"gb_per_s": rate})


def fill_shared(tensors: Any, seconds: Any) -> None:
    """The second process: fills the tensor of the first, and keeps it until the first has looked."""
    import torch

    tensor = tensors.get()
    values = torch.arange(tensor.numel(), device="cuda", dtype=tensor.dtype)
    torch.cuda.synchronize()
    started = time.perf_counter()
    tensor.copy_(values)
    torch.cuda.synchronize()
    seconds.put(time.perf_counter() - started)
    tensors.get()
