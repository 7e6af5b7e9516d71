"""vLLM's own weight transfer on a CPU: rank 0 and the workers believe in NCCL and have gloo in its place."""

from pathlib import Path

import torch.distributed

from rft.rollout.server.weights import broadcast, vllm_transfer
from tests.rollout.server.vllm_plugin import nccl_over_gloo
from tests.rollout.server.vllm_plugin.nccl_over_gloo import TorchNCCL

PLUGIN = str(Path(nccl_over_gloo.__file__).parent)  # in PYTHONPATH of a real server


def use_gloo(monkeypatch):
    """Gives rank 0 gloo in place of NCCL, and lets it take all devices for GPUs."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", TorchNCCL, raising=False)
    for module in (broadcast, vllm_transfer):
        monkeypatch.setattr(module, "all_on_gpus", lambda device, devices: True)
