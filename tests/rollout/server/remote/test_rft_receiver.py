"""What a worker does with new weights beside receiving them; the real one runs in test_vllm.py, the slow tests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore

from rft.rollout.server.remote.rft_receiver import PackExperts, authenticate, join, own_address


class Kernel:
    """Packs the weight of a layer: negates it."""

    def process_weights_after_loading(self, layer):
        layer.weight = -layer.weight


@pytest.mark.parametrize("packs_itself", [False, True])
def test_experts_are_packed_once_after_every_load(packs_itself):
    class Method:
        def __init__(self):
            self.moe_kernel, self.fused_experts = self, Kernel()

        def process_weights_after_loading(self, layer):
            layer.weight += 0.5
            if packs_itself:
                self.fused_experts.process_weights_after_loading(layer)

    class Layer:
        weight = 0.0

    method, layer = Method(), Layer()
    method.process_weights_after_loading = PackExperts(method)
    for loaded in (1.0, 3.0):
        layer.weight = loaded
        method.process_weights_after_loading(layer)
        assert layer.weight == -(loaded + 0.5)


def joined(tokens):
    """What members of a process group come to, that have these tokens."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def member(rank):
        own = TCPStore("127.0.0.1", store.port, is_master=False)
        group = join(own, "group", rank, len(tokens), "gloo", 10.0, own_address("127.0.0.1", store.port))
        try:
            authenticate(group, rank, len(tokens), tokens[rank], torch.device("cpu"), 10.0)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as threads:
        return list(threads.map(member, range(len(tokens))))


def test_members_with_one_token_join():
    assert joined(["a", "a", "a"]) == ["", "", ""]


def test_every_member_notices_another_token():
    error = "member {} of the process group has another token"
    assert joined(["a", "b"]) == [error.format(1), error.format(0)]
    assert joined(["a", "a", "b"]) == [error.format(2), error.format(2), error.format(0)]
