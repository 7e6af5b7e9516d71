"""Which kernels of attention can compute packed rows on a device; they are in `rft.actor.packing.kernels`."""

from importlib.util import find_spec
from typing import Literal

import torch

from rft.distributed import device_kind, missing_capability

Attention = Literal["auto", "flash", "varlen", "flex", "sdpa"]
FLASH_PACKAGES = ("flash_attn_interface", "flash_attn")  # FlashAttention 3, then 2
ORDER: tuple[Attention, ...] = ("flash", "varlen", "sdpa")  # in which strategy.attention=auto tries them
CAPABILITY = (8, 0)  # of the first GPUs that the kernels run on (Ampere)
NEEDS_CUDA = {
    "flash": "the kernels of flash-attn need a CUDA device",
    "varlen": "torch's attention over rows of any length needs a CUDA device",
    "flex": "torch's flex attention has no backward pass on a CPU",
}


def flash_package() -> str | None:
    """The module of the newest installed FlashAttention, or None."""
    return next((package for package in FLASH_PACKAGES if find_spec(package) is not None), None)


def obstacle(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Why a kernel cannot compute, or None. `mode=plan` may name a device that this machine does not have.

    Args:
        name: of the kernel.
        device: its type, or auto: CUDA where there is a device.
        dtype: of the forward.
    """
    if name not in NEEDS_CUDA:
        return None
    if device_kind(device) != "cuda":
        return NEEDS_CUDA[name]
    if name != "flex" and dtype == torch.float32:
        return "its kernels compute in bfloat16 and float16 only"
    if name == "flash" and torch.cuda.is_available() and flash_package() is None:
        return "flash-attn is not installed: pip install 'rft[flash]'"
    missing = missing_capability(CAPABILITY)
    return None if missing is None else f"its kernels need {missing}"


def check_attention(name: str, device: str, dtype: torch.dtype) -> None:
    """Checks the kernel that a user has chosen.

    Args:
        name: of a kernel, or auto, which every device has.

    Raises:
        ValueError: it cannot compute there.
    """
    if (reason := obstacle(name, device, dtype)) is not None:
        raise ValueError(f"strategy.attention={name}: {reason}; set strategy.attention=auto")


def kernels_to_try(attention: str, device: str, dtype: torch.dtype) -> list[str]:
    """The kernels that may compute, the first one that suits the model: all that can with `auto`, else the named one.

    Raises:
        ValueError: the named one cannot compute there.
    """
    if attention == "auto":
        return [name for name in ORDER if obstacle(name, device, dtype) is None]
    check_attention(attention, device, dtype)
    return [attention]
