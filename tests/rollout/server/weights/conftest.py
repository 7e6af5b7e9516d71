"""Engines with scripted servers that are given weights through groups."""

from dataclasses import replace

import pytest
import torch.distributed

from rft.rollout.server.weights import broadcast
from rft.rollout.server.weights.broadcast import BroadcastGroup
from tests.rollout.server import fake_server
from tests.rollout.server.fake_workers import Workers
from tests.rollout.server.vllm_plugin.nccl_over_gloo import TorchNCCL
from tests.rollout.server.weights.outcomes import OWN, outcome


@pytest.fixture
def served(fakes, engine, monkeypatch):
    """An engine whose servers are given weights through process groups, and the servers, which serve version 0."""

    def make(kind, count=1, sync_s=0.4, transport="group", **options):
        if transport == OWN:
            use_own_transfer(monkeypatch)
            transport = "group"
        servers = fakes(count)
        for server in servers:
            server.workers, server.wait_s = Workers(), sync_s
        samples = engine(kind, servers, **{"transport": transport, "poll_s": 0.01} | options)
        assert outcome(samples, 0) == ""
        samples._options.sync_s = sync_s
        return samples, servers

    return make


class NCCLGroup(BroadcastGroup):
    """A group that believes in GPUs, except where it shares memory."""

    def __init__(self, *args):
        super().__init__(*args)
        if not self._shares_memory:
            self.rendezvous = replace(self.rendezvous, backend="nccl")


def use_own_transfer(monkeypatch):
    """Servers whose workers lack `Receiver` and have vLLM's own transfer, with gloo in place of NCCL."""
    info = fake_server.SERVER_INFO["vllm_config"]
    monkeypatch.setitem(info["parallel_config"], "worker_extension_cls", "")
    monkeypatch.setitem(info, "weight_transfer_config", {"backend": "nccl"})
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", TorchNCCL, raising=False)
    monkeypatch.setattr(broadcast, "BroadcastGroup", NCCLGroup)
