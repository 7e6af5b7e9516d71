"""The peak speed of a GPU, which model FLOPs utilisation divides by."""

import torch

# Dense TFLOPS in bfloat16 and float16, of NVIDIA's data sheets; the first name that the device's name contains counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
}


def known_peak(device: str, dtype: torch.dtype) -> float | None:
    """The dense peak of a GPU by its name, or None where it is not known.

    float32 is not known: its peak depends on whether the products of matrices are rounded to TF32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
