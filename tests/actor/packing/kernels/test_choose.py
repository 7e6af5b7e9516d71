"""The kernel of `strategy.attention`: what auto takes, and a kernel that a test on the device finds wrong."""

from types import SimpleNamespace

import pytest
import torch

from rft.actor.packing.kernels import choose
from rft.actor.packing.kernels.base import AttentionNeeds
from rft.actor.packing.kernels.choose import KERNELS, choose_kernel
from rft.actor.packing.kernels.device_test import TOLERANCE, largest_error
from rft.actor.packing.kernels.rows import FlashKernel, PlannedKernel, VarlenKernel
from rft.actor.packing.kernels.sdpa import SdpaKernel
from rft.strategy.attention import ORDER, Attention
from tests.actor.packing.kernels.references import aten_backward, install

CPU = torch.device("cpu")
NEEDS = AttentionNeeds(softcap=False, sinks=True, windows=True, width=16, heads=4, key_heads=2)


def strategy(attention="auto", device="cpu", dtype=torch.float32):
    """A strategy of one process on the CPU whose run is on `device`."""
    world = SimpleNamespace(device=CPU, rank=0)
    return SimpleNamespace(attention=attention, device_type=device, dtype=dtype, world=world)


def test_every_name_has_a_kernel():
    assert {"auto", *KERNELS} == {*Attention.__args__} and {*ORDER} < {*KERNELS}


def test_auto_on_a_cpu_is_sdpa():
    assert type(choose_kernel(strategy(), NEEDS, "actor")) is SdpaKernel
    assert type(choose_kernel(strategy("sdpa"), NEEDS, "actor")) is SdpaKernel


REASONS = {"flash": "flash-attn need a", "varlen": "any length needs a", "flex": "no backward"}


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_a_kernel_of_a_gpu_is_refused_on_a_cpu(name, reason):
    with pytest.raises(ValueError, match=rf"^strategy\.attention={name}: .*{reason}.*; set strategy\.attention=auto$"):
        choose_kernel(strategy(name), NEEDS, "actor")


def test_a_plan_for_gpus_has_the_tensors_of_torchs_kernel():
    half = torch.bfloat16
    for name in ("auto", "flash", "varlen", "flex"):
        assert isinstance(choose_kernel(strategy(name, "cuda", half), NEEDS, "actor"), VarlenKernel)
    assert type(choose_kernel(strategy("auto", "cuda"), NEEDS, "actor")) is SdpaKernel, "float32"
    with pytest.raises(ValueError, match=r"^strategy\.attention=varlen: its kernels compute in bfloat16 and float16"):
        choose_kernel(strategy("varlen", "cuda"), NEEDS, "actor")


def test_the_log_says_which_kernel_auto_takes_and_which_cannot(caplog):
    """At the level that a run shows."""
    capped = AttentionNeeds(softcap=False, sinks=False, windows=False, width=320, heads=4, key_heads=2)
    assert type(choose_kernel(strategy("auto", "cuda", torch.bfloat16), capped, "critic")) is SdpaKernel
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.message == (
        "critic: packed rows attend by sdpa; flash cannot: heads of 320 numbers: at most 256; varlen cannot: heads of "
        "320 numbers: at most 256"
    )


def test_what_a_kernel_cannot_compute_is_named():
    capped = AttentionNeeds(softcap=True, sinks=False, windows=True, width=16, heads=4, key_heads=2)
    assert type(choose_kernel(strategy("flash", "cuda", torch.bfloat16), capped, "actor")) is PlannedKernel
    with pytest.raises(ValueError, match=r"^strategy\.attention=varlen, which the critic cannot use \(varlen cannot"):
        choose_kernel(strategy("varlen", "cuda", torch.bfloat16), capped, "critic")


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    """The run is on this device, for which the kernels of a GPU are stood in for."""
    install("varlen", monkeypatch)
    monkeypatch.setattr(choose, "kernels_to_try", lambda *_: ["varlen", "sdpa"])
    assert type(choose_kernel(strategy(), NEEDS, "actor")) is VarlenKernel

    def wrong(gradient, *arguments, **options):
        dq, dk, dv = aten_backward(gradient, *arguments, **options)
        return dq, dk, 1.1 * dv

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", wrong)
    assert type(choose_kernel(strategy(), NEEDS, "actor")) is SdpaKernel
    monkeypatch.setattr(choose, "kernels_to_try", lambda *_: ["varlen"])
    with pytest.raises(ValueError, match=r"varlen cannot: a test on the device is off by 0\.1 "):
        choose_kernel(strategy(), NEEDS, "actor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_limit_leaves_room_for_the_rounding_of_a_dtype(dtype):
    capped = AttentionNeeds(softcap=True, sinks=True, windows=True, width=64, heads=4, key_heads=2)
    error = largest_error(SdpaKernel(), capped, CPU, dtype)
    assert 1e-4 < error < TOLERANCE[dtype]


def test_flash_attention_is_made_only_if_it_is_installed():
    with pytest.raises(AssertionError):
        FlashKernel()
