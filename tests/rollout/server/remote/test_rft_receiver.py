"""What a worker does with new weights beside receiving them; the real one runs in test_vllm.py, the slow tests."""

import pytest

from rft.rollout.server.remote.rft_receiver import PackExperts


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
