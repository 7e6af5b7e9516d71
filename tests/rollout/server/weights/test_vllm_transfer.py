"""vLLM's own weight transfer to scripted servers; test_broadcast.py has every message of it that fails, and
../test_vllm_real_servers.py a real server."""

import pytest
import torch

from rft.rollout.server.weights import buckets
from tests.rollout.server import fake_server
from tests.rollout.server.own_transfer import use_gloo
from tests.rollout.server.weights.outcomes import OWN, committed, outcome


def test_only_what_differs_travels_and_without_gaps(served):
    samples, [server] = served("vllm", transport=OWN)
    assert committed(samples, 0) and outcome(samples, 1) == "" and committed(samples, 1)
    assert server.workers.loads == [["still", "w"], ["w"]]
    assert samples.health()["sent_mib"] * 2**20 == (12 + 16) + 16
    assert server.calls["/init_weight_transfer_engine"] == 1 and not server.calls["/collective_rpc"]


@pytest.mark.parametrize("size", [2**28, 1], ids=["one bucket", "a bucket for each tensor"])
def test_tensors_of_every_element_size_arrive_as_they_were(size, served, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", size)
    samples, [server] = served("vllm", transport=OWN)
    tensors = {"a": torch.ones(3).bool(), "b": torch.randn(5).bfloat16(), "c": torch.tensor(7.5), "d": torch.empty(0)}
    tensors |= {"e": torch.randn(2, 3).double(), "f": torch.arange(3)}
    assert outcome(samples, 1, tensors) == ""
    held = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    assert {name: server.workers.held[name] for name in tensors} == held


def test_an_update_that_another_trainer_left_open_is_ended_first(served):
    samples, [server] = served("vllm", transport=OWN)
    samples._pool._monitors[0].close_transport()
    server.workers.updating = server.workers.broken = True
    assert outcome(samples, 1) == "" and committed(samples, 1)
    assert not server.workers.updating and not server.workers.broken


def test_a_sleeping_server_joins_another_group_before_it_has_memory_for_weights(served):
    samples, [server] = served("vllm", transport=OWN, sleep=True)
    for version in (1, 2):
        samples.sleep()
        assert not server.memory
        if version == 2:
            samples._pool._monitors[0].close_transport()
        assert outcome(samples, version) == "" and committed(samples, version)
    assert server.calls["/init_weight_transfer_engine"] == 2


@pytest.mark.parametrize(
    ("started", "gpus", "options"),
    [
        ({"backend": "nccl"}, True, {"deltas": True}),
        ({"backend": "nccl"}, True, {"transport": "ipc"}),
        ({"backend": "nccl"}, False, {}),
        ({"backend": "ipc"}, True, {}),
        (None, True, {}),
    ],
)
def test_where_it_cannot_be_used_the_cures_are_named(started, gpus, options, fakes, engine, monkeypatch):
    info = fake_server.SERVER_INFO["vllm_config"]
    monkeypatch.setitem(info["parallel_config"], "worker_extension_cls", "")
    monkeypatch.setitem(info, "weight_transfer_config", started)
    if gpus:
        use_gloo(monkeypatch)
    [server] = fakes(1)
    error = outcome(engine("vllm", [server], **{"transport": "group", "poll_s": 0.01} | options), 0)
    assert f"server 0 ({server.address}): its workers cannot join a process group: start it with --worker-ext" in error
    assert "rollout.engine.servers.deltas is false" in error and "transport=group" in error
    assert """start it with --weight-transfer-config '{"backend": "nccl"}'""" in error
    assert not server.calls["/init_weight_transfer_engine"] and error.endswith(
        "rollout.engine.servers.transport=folder"
    )
