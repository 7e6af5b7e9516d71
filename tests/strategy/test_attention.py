"""Which kernels a device, a dtype and the installed packages allow."""

from importlib.machinery import ModuleSpec

import pytest
import torch

from rft.strategy import attention
from rft.strategy.attention import check_attention, flash_package, kernels_to_try, obstacle

HALF = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """What torch answers about a GPU, and the packages that are installed."""

    def become(capability, *packages):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        found = {name: ModuleSpec(name, None) for name in packages}
        monkeypatch.setattr(attention, "find_spec", found.get)

    return become


def test_auto_takes_what_is_installed(gpu):
    gpu((9, 0))
    assert kernels_to_try("auto", "cuda", HALF) == ["varlen", "sdpa"]
    assert obstacle("flash", "auto", HALF) == "flash-attn is not installed: pip install 'rft[flash]'"
    gpu((9, 0), "flash_attn")
    assert kernels_to_try("auto", "cuda", HALF) == ["flash", "varlen", "sdpa"] and flash_package() == "flash_attn"
    gpu((9, 0), "flash_attn", "flash_attn_interface")
    assert flash_package() == "flash_attn_interface"
    assert kernels_to_try("auto", "cuda", torch.float32) == ["sdpa"]


def test_old_gpus_have_no_such_kernels(gpu):
    gpu((7, 5), "flash_attn")
    assert kernels_to_try("auto", "cuda", torch.float16) == ["sdpa"]
    with pytest.raises(ValueError, match=r"^strategy\.attention=flex: .* 8\.0 or more, and this one has 7\.5; set "):
        check_attention("flex", "cuda", HALF)


def test_a_cpu_has_sdpa_alone():
    assert kernels_to_try("auto", "cpu", torch.float32) == kernels_to_try("auto", "auto", HALF) == ["sdpa"]
    assert check_attention("auto", "cpu", HALF) is check_attention("sdpa", "cpu", HALF) is None
