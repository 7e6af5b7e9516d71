"""Engines with scripted servers that are given weights through groups."""

import pytest

from tests.conftest import SOON_S
from tests.rollout.server import fake_server
from tests.rollout.server.fake_workers import Workers
from tests.rollout.server.own_transfer import use_gloo
from tests.rollout.server.weights.outcomes import OWN, outcome


@pytest.fixture
def served(fakes, engine, monkeypatch):
    """An engine whose servers are given weights through process groups, and the servers, which serve version 0."""

    def make(kind, count=1, sync_s=SOON_S, transport="group", **options):
        if transport == OWN:
            info = fake_server.SERVER_INFO["vllm_config"]
            monkeypatch.setitem(info["parallel_config"], "worker_extension_cls", "")
            monkeypatch.setitem(info, "weight_transfer_config", {"backend": "nccl"})
            use_gloo(monkeypatch)
            transport = "group"
        servers = fakes(count)
        for server in servers:
            server.workers, server.wait_s = Workers(), sync_s
        samples = engine(kind, servers, **{"transport": transport, "poll_s": 0.01} | options)
        assert outcome(samples, 0) == ""
        vars(samples.options.servers)["sync_s"] = sync_s
        return samples, servers

    return make
