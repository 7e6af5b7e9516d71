"""Two ranks share two servers, of which one is killed, and then the other."""

import threading
from pathlib import Path

import pytest
import torch

from tests.ranks.forked import DEADLINE_S
from tests.rollout.server.real_servers import until
from tests.rollout.server.scripted import requests, right, weights


@pytest.mark.slow
def test_two_ranks_share_servers(torchrun, fakes, tmp_path):
    servers = fakes()

    def kill(asked, told, which):
        until((tmp_path / asked).exists, DEADLINE_S)
        for server in which:
            server.kill()
        (tmp_path / told).touch()

    def watch():
        kill("kill", "killed", servers[:1])
        kill("kill all", "killed all", servers[1:])

    threading.Thread(target=watch, daemon=True).start()
    addresses = [server.address for server in servers]
    torchrun(Path(__file__).parent / "servers_on_ranks.py", tmp_path, "vllm", *addresses)
    ranks = torch.load(tmp_path / "found.pt")
    for rank, found in enumerate(ranks):
        mine = requests(12)[rank::2]
        assert {version: found[version] for version in (0, 1, 2)} == {v: right(mine, v) for v in (0, 1, 2)}
        assert found["alone"] == right(mine, 1)
        assert found["walked"] == 4 * list(weights(0)), "to gather is a collective"
        assert found["error"].startswith("TimeoutError: rank 0 waits for server 0")
        assert all(f"server {number} ({address})" in found["error"] for number, address in enumerate(addresses))
    assert set(servers[0].samples.values()) <= {1, 2}, "a sample is asked for once a version"
