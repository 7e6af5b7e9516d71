"""Weights that come through process groups and shared memory: what travels, how it is checked, and every message of it
that fails."""

import gc
import logging
import os
import time
from pathlib import Path

import pytest
import torch

from rft.rollout.server.remote import rft_receiver
from rft.rollout.server.remote.rft_shared_memory import SharedMemory
from rft.rollout.server.weights import buckets
from tests.conftest import SOON_S
from tests.rollout.server import fake_server
from tests.rollout.server.fake_server import TRANSFER, FakeServer
from tests.rollout.server.fake_workers import Workers
from tests.rollout.server.real_servers import memory_of, opened_by, until
from tests.rollout.server.scripted import deadlines
from tests.rollout.server.weights.outcomes import OWN, committed, outcome

MESSAGES = {
    "vllm": ["/collective_rpc rft_join", "/collective_rpc rft_receive"],
    "sglang": ["/init_weights_update_group", "/update_weights_from_distributed", "/update_weight_version"],
}
RECEIVE = {kind: MESSAGES[kind][1] for kind in MESSAGES}
WAYS = [("vllm", "group"), ("vllm", "ipc"), ("vllm", OWN), ("sglang", "group")]
EVERY = [(kind, "group", message) for kind, messages in MESSAGES.items() for message in messages]
EVERY += [("vllm", "ipc", f"/collective_rpc {method}") for method in ("rft_map", "rft_receive")]
EVERY += [("vllm", OWN, path) for path in TRANSFER]
FAULTS = ["drop", "lose", "twice", "late", "corrupt", 400, "never"]
NEVER_S = 0.4  # a message that never comes ends within it; it is sent again where a busy machine takes longer


def receive(kind, transport):
    """The message with which weights are received."""
    return "/update_weights" if transport == OWN else RECEIVE[kind]


def test_memory_is_used_again_for_every_bucket(served, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 48)
    samples, [server] = served("vllm", transport="ipc")
    samples.health()
    tensors = {"layers.0.w": torch.arange(64.0), "layers.0.b": torch.arange(5), "layers.1.w": torch.ones(2, 3).half()}
    assert outcome(samples, 1, tensors) == ""
    assert {name: server.workers.held[name] for name in tensors} == {n: t.numpy().tobytes() for n, t in tensors.items()}
    assert samples.health()["sent_mib"] * 2**20 == (256 + 8) + (48 + 8) + (16 + 8), "a bucket for each tensor"


def test_a_worker_that_cannot_map_the_memory_of_rank_0_says_so(served, monkeypatch):
    samples, [server] = served("vllm", transport="ipc", retries=0)
    handle = SharedMemory.handle
    monkeypatch.setattr(SharedMemory, "handle", lambda memory: handle(memory) | {"inode": 1})
    error = outcome(samples, 1)
    assert "cannot map the memory of rank 0" in error and "set rollout.engine.servers.transport=group" in error
    assert server.version == "0"


def test_a_server_that_was_started_anew_between_two_looks_gets_a_new_group_at_once(kind, served):
    samples, [server] = served(kind)
    server.workers, server.version = Workers(), None
    until(lambda: server.version == "0", SOON_S)
    assert server.workers.loads == [["still", "w"]] and server.calls[RECEIVE[kind]] == 2
    assert committed(samples, 0)


def test_only_what_differs_travels_and_all_of_it_to_a_server_that_was_started_anew(kind, served):
    samples, [server] = served(kind)
    assert committed(samples, 0) and outcome(samples, 1) == "" and committed(samples, 1)
    assert server.workers.loads == [["still", "w"], ["w"]]
    packed = {"vllm": (16 + 16 + 8) + (16 + 8), "sglang": (16 + 12) + 16}
    assert samples.health()["sent_mib"] == packed[kind] / 2**20 and samples.health()["sent_mib"] == 0.0
    server.kill()
    back = FakeServer(server.port, version="0")
    try:
        back.workers = Workers()
        assert committed(samples, 1)
        assert outcome(samples, 2) == "" and committed(samples, 2)
        assert back.workers.loads == [["still", "w"], ["w"]]
    finally:
        back.kill()


def test_changed_elements_alone_travel_to_workers_that_have_the_rest(served):
    samples, [server] = served("vllm", deltas=True)
    samples.health()
    tensors = {"layers.0.w": torch.arange(64.0), "layers.0.b": torch.ones(40), "layers.1.w": torch.ones(3)}
    steps = [{"layers.0.w": [3, 60]}, {"layers.0.b": [0]}, {"layers.0.w": [3]}, {"layers.1.w": [0, 1, 2]}]
    layer = 24 + (16 + 16) + 8  # numbers, places and values, checksum
    sizes = [32 + (256 + 160 + 16 + 8), layer, layer, layer, 16 + (16 + 8)]
    for version, (size, step) in enumerate(zip(sizes, [{}, *steps], strict=True), 1):
        for name, places in step.items():
            tensors = tensors | {name: tensors[name].clone()}
            tensors[name][places] += 1
        assert outcome(samples, version, tensors) == ""
        held = {name: server.workers.held[name] for name in tensors}
        assert held == {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        assert samples.health()["sent_mib"] * 2**20 == size, version
    server.faults[RECEIVE["vllm"]] = [400]
    tensors["layers.0.w"] = tensors["layers.0.w"] + (torch.arange(64) == 5)
    assert outcome(samples, 9, tensors) == ""
    assert server.workers.held["layers.0.w"] == tensors["layers.0.w"].numpy().tobytes()
    assert samples.health()["sent_mib"] * 2**20 > sizes[0], "a new group has no copies"
    samples._pool._monitors[0].transport._copies["layers.1.w"] = "the digest of other bytes"
    tensors["layers.1.w"] = tensors["layers.1.w"] + torch.eye(3)[0]
    assert outcome(samples, 10, tensors) == ""
    assert samples.health()["sent_mib"] * 2**20 == sizes[-1], "an unknown copy is replaced by the whole tensor"
    assert server.workers.held["layers.1.w"] == tensors["layers.1.w"].numpy().tobytes()


@pytest.mark.parametrize("fault", ["drop", 400])
def test_a_bucket_that_fails_leaves_no_memory_to_the_garbage_collection(fault, served, monkeypatch):
    """It may come much later. pytest keeps the records of warnings, which hold errors."""
    monkeypatch.setattr(logging.getLogger("rft.rollout.server.server_pool"), "disabled", True)
    gc.collect()
    samples, [server] = served("vllm", transport="ipc")
    gc.disable()
    try:
        server.faults[RECEIVE["vllm"]] = [fault]
        assert outcome(samples, 1) == "" and committed(samples, 1)
        until(lambda: not memory_of(os.getpid()), SOON_S)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transport", "message"), EVERY)
def test_a_message_of_a_group_that_fails_once(served, kind, transport, message, monkeypatch):
    # pytest keeps the records of warnings, which hold errors, and these the memory that was in use
    monkeypatch.setattr(logging.getLogger("rft.rollout.server.server_pool"), "disabled", True)
    samples, [server] = served(kind, sync_s=NEVER_S, transport=transport)
    for version, fault in enumerate(FAULTS, 1):
        if any(word in message for word in ("join", "init", "shutdown")):
            server.faults[receive(kind, transport)] = [400]  # so that there must be another group
        calls, server.faults[message] = server.calls[message], [fault]
        assert outcome(samples, version) == "", f"{fault}: there is time to do it again"
        assert server.calls[message] > calls and committed(samples, version), fault
    until(lambda: not memory_of(os.getpid()), SOON_S)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transport", "message"), EVERY)
def test_a_message_of_a_group_that_always_fails(served, kind, transport, message):
    samples, [bad, good] = served(kind, 2, sync_s=NEVER_S, retries=0, transport=transport)
    for version, fault in enumerate((400, "never"), 1):
        bad.faults[receive(kind, transport)] = [400]
        bad.always[message] = fault
        assert outcome(samples, version) == "" and committed(samples, version), "the other server is not held up"
    if message == RECEIVE["sglang"]:
        assert bad.version == "loading", "half of the weights have no version"
    good.kill()
    with deadlines(samples, start_s=0.1):
        error = outcome(samples, 3)
    assert f"server 0 ({bad.address})" in error and "to acknowledge version 3 (" in error and error.endswith("), 0.5 s")


@pytest.mark.parametrize("transport", ["group", "ipc"])
def test_what_arrives_damaged_is_not_served(transport, served, monkeypatch):
    samples, [server] = served("vllm", transport=transport)
    real, damage = rft_receiver.broadcast, []

    def damaged(group, tensor, *rest):
        real(group, tensor, *rest)
        if not damage:
            damage.append(tensor[3].item())
            tensor[3] ^= 64

    monkeypatch.setattr(rft_receiver, "broadcast", damaged)
    assert outcome(samples, 1) == "" and damage and committed(samples, 1)
    assert server.calls[RECEIVE["vllm"]] == 3 and server.workers.loads[1:] == [[], ["still", "w"]], "and whole again"


@pytest.mark.parametrize(("kind", "transport"), WAYS)
def test_a_server_that_dies_while_weights_travel_is_left_behind(kind, transport, served, monkeypatch, caplog):
    samples, [bad, _] = served(kind, 2, sync_s=5 * SOON_S, retries=0, transport=transport)
    real = rft_receiver.broadcast

    def dies(group, tensor, *rest):
        if group in (bad.workers.rft_group, *bad.workers.groups.values()):
            bad.kill()
        real(group, tensor, *rest)

    monkeypatch.setattr(rft_receiver, "broadcast", dies)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert outcome(samples, 1) == ""
    assert time.monotonic() - begun < SOON_S and any(bad.address in text for text in caplog.messages)
    assert committed(samples, 1)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("vllm", {"worker_extension_cls": ""}, "its workers cannot join a process group: start it with --worker-ext"),
        ("vllm", {"data_parallel_size": 2}, "it has data_parallel_size above 1"),
        ("sglang", {"dp_size": 2}, "it has dp_size or pp_size above 1"),
    ],
)
def test_a_server_that_cannot_join_is_refused_with_the_cure(fakes, engine, monkeypatch, kind, changes, said):
    for name, value in changes.items():
        info = fake_server.SERVER_INFO
        info = info if kind == "sglang" else info["vllm_config"]["parallel_config"]
        monkeypatch.setitem(info, name, value)
    [server] = fakes(1)
    error = outcome(engine(kind, [server], transport="group", poll_s=0.01), 0)
    assert f"server 0 ({server.address}): {said}" in error
    assert error.endswith("set rollout.engine.servers.transport=folder")


def test_a_worker_that_left_its_group_says_so():
    with pytest.raises(RuntimeError, match="it is in no process group"):
        Workers().rft_receive([[("w", "float32", [1])]], "gloo", 1.0, False)


def listening_addresses():
    """The addresses on which this process listens, as in /proc/net."""
    links = [link for link in opened_by(os.getpid()) if link.startswith("socket:[")]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own}


@pytest.mark.parametrize("kind", MESSAGES)
def test_rank_0_listens_on_the_interface_that_leads_to_the_server_alone(kind, served):
    before = listening_addresses()
    served(kind)
    assert listening_addresses() | before == {"0100007F"}, "127.0.0.1"
