"""vLLM's own weight transfer on a CPU: rank 0 and the workers believe in NCCL and have gloo in its place."""

from dataclasses import replace
from pathlib import Path

import torch.distributed

from rft.rollout.server.weights import broadcast
from rft.rollout.server.weights.broadcast import BroadcastGroup
from tests.rollout.server.vllm_plugin import nccl_over_gloo
from tests.rollout.server.vllm_plugin.nccl_over_gloo import TorchNCCL

PLUGIN = str(Path(nccl_over_gloo.__file__).parent)  # in PYTHONPATH of a real server


class NCCLGroup(BroadcastGroup):
    """A group that takes all devices for GPUs, except where it shares memory."""

    def __init__(self, *args):
        super().__init__(*args)
        if not self._shares_memory:
            self.rendezvous = replace(self.rendezvous, backend="nccl")


def use_gloo(monkeypatch):
    """Gives rank 0 gloo in place of NCCL."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", TorchNCCL, raising=False)
    monkeypatch.setattr(broadcast, "BroadcastGroup", NCCLGroup)
