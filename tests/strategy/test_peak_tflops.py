"""The peak speed of a device."""

import pytest
import torch

from rft.distributed import start
from rft.strategy.peak_tflops import known_peak
from tests.helpers import make_strategy


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_known_gpus(device: str, peak: float | None) -> None:
    assert known_peak(device, torch.bfloat16) == known_peak(device, torch.float16) == peak
    assert known_peak(device, torch.float32) is None


def test_the_option_counts_before_what_is_known() -> None:
    world = start("cpu")
    assert make_strategy(world).peak_tflops() is None
    assert make_strategy(world, peak_tflops=0.5).peak_tflops() == 0.5
