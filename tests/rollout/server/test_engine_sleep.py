"""Servers that give memory back while the policy trains. Whatever becomes of a message, a version is served or an error
names the server, and never is a sample taken of other weights."""

import logging
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from rft.rollout.server.options import Servers
from rft.rollout.server.sglang import SGLangServers
from rft.rollout.server.vllm import VLLMServers
from tests.conftest import SOON_S
from tests.remote.test_process_supervisor import await_that
from tests.rollout.server import fake_server
from tests.rollout.server.fake_server import PARTS, FakeServer
from tests.rollout.server.fake_workers import Workers
from tests.rollout.server.scripted import OPTIONS, SAMPLING, current, deadlines, requests, right, said, weights

pytestmark = pytest.mark.slow

MESSAGES = {
    "vllm": ["/sleep?level=2", "/update_weight_version", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"],
    "sglang": [
        "/pause_generation",
        "/flush_cache?timeout=10",
        "/update_weight_version",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/continue_generation",
    ],
}
EVERY = [(kind, message) for kind, messages in MESSAGES.items() for message in messages]
FAULTS = ["drop", "lose", "twice", "late", 400]
FOR_GOOD = ("/release_memory_occupation", "/resume_memory_occupation")  # an SGLang server must not hear them twice


def sleepy(engine, kind, servers, **changes):
    """An engine whose servers serve version 0, and sleep when they are told."""
    made = engine(kind, servers, sleep=True, **{"poll_s": 0.05} | changes)
    made.update_weights(0, weights(0).items())
    return made


def committed(samples, version):
    """Whether what is sampled now is of the version alone."""
    return said(samples.generate(requests(2), SAMPLING)) == right(requests(2), version)


@pytest.mark.parametrize("transport", ["folder", "group"])
def test_memory_is_given_back_and_weights_come_before_keys_and_values(kind, transport, fakes, engine):
    servers = fakes()
    for server in servers:
        server.workers = Workers()
    samples = sleepy(engine, kind, servers, transport=transport)
    for version in (1, 2, 3):
        assert committed(samples, version - 1)
        samples.sleep()
        assert all(server.memory == frozenset() for server in servers)
        samples.update_weights(version, weights(version).items())
        assert all((server.loaded, server.memory, server.paused) == ({"weights"}, PARTS, False) for server in servers)
    assert committed(samples, 3)
    joins = {"vllm": "/collective_rpc rft_join", "sglang": "/init_weights_update_group"}[kind]
    assert {server.calls[joins] for server in servers} == {int(transport == "group")}, "one group for all versions"


def test_servers_stay_awake_where_nobody_asked(kind, fakes, engine):
    servers = fakes()
    samples = engine(kind, servers)
    samples.update_weights(0, weights(0).items())
    samples.sleep()
    assert committed(samples, 0) and all(server.memory == PARTS for server in servers)


@pytest.mark.parametrize(("kind", "message"), EVERY)
def test_a_message_about_memory_that_fails_once(fakes, engine, kind, message):
    bad, good = fakes()
    samples = sleepy(engine, kind, [bad, good], retries=1)
    for version, fault in enumerate(FAULTS, 1):
        calls, bad.faults[message] = bad.calls[message], [fault]
        samples.sleep()
        assert good.memory == frozenset()
        samples.update_weights(version, weights(version).items())
        assert bad.calls[message] > calls and committed(samples, version), fault
        if message not in FOR_GOOD or fault == "late":
            await_that(lambda: current(samples) == 2)
        elif current(samples) < 2:
            assert bad.version == "unsure" and bad.gone.is_set() == (fault == "twice")
            bad.kill()
            bad = FakeServer(bad.port)
            await_that(lambda: current(samples) == 2)
    bad.kill()


@pytest.mark.parametrize(("kind", "message"), EVERY)
def test_a_message_about_memory_that_always_fails(fakes, engine, kind, message):
    [server] = fakes(1)
    samples = sleepy(engine, kind, [server], retries=1)
    where = f"server 0 ({server.address})"
    for version, (fault, seconds) in enumerate({"drop": 0.2, 400: SOON_S}.items(), 1):
        server.always[message] = fault
        try:
            with deadlines(samples, start_s=seconds, sync_s=seconds):
                samples.sleep()
                samples.update_weights(version, weights(version).items())
        except OSError as error:
            assert where in str(error)
            assert fault == "drop" or str(error).startswith(where), "it said no: no deadline is waited for"
            server.always.clear()
            if server.version == "unsure":
                return
            samples.update_weights(version, weights(version).items())
        server.always.clear()
        assert committed(samples, version)


def test_a_server_that_is_started_anew_while_it_sleeps_sleeps_again_and_wakes(kind, fakes, engine, caplog):
    [server] = fakes(1)
    samples = sleepy(engine, kind, [server])
    samples.sleep()
    server.kill()
    await_that(lambda: not samples._pool._monitors[0].asleep)
    back = FakeServer(server.port)
    try:
        await_that(lambda: back.memory == frozenset())
        samples.update_weights(1, weights(1).items())
        assert committed(samples, 1)
    finally:
        back.kill()


def test_a_server_that_slept_when_a_run_ended_is_waked_by_the_next(kind, fakes, engine):
    [server] = fakes(1)
    sleepy(engine, kind, [server]).sleep()
    samples = engine(kind, [server])
    samples.update_weights(5, weights(5).items())
    assert committed(samples, 5) and server.memory == PARTS


def test_one_that_will_not_sleep_keeps_its_memory_alone(kind, fakes, engine, caplog):
    bad, good = fakes()
    samples = sleepy(engine, kind, [bad, good], retries=1)
    bad.always[MESSAGES[kind][0]] = "corrupt"
    with caplog.at_level(logging.WARNING):
        samples.sleep()
    assert (bad.memory, good.memory) == (PARTS, frozenset())
    assert any(f"server 0 ({bad.address}) did not go to sleep and is left behind" in text for text in caplog.messages)


@pytest.mark.parametrize(("kind", "flag"), [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver")])
def test_a_server_with_a_gpu_must_have_been_started_for_it(kind, flag, fakes, engine, monkeypatch):
    about = deepcopy(fake_server.SERVER_INFO) | {"device": "cuda"}
    about["vllm_config"]["device_config"]["device"] = "cuda"
    monkeypatch.setattr(fake_server, "SERVER_INFO", about)
    samples = sleepy(engine, kind, fakes(1), start_s=100.0)
    with pytest.raises(
        OSError, match=rf"server 0 .* cannot sleep: start it with {flag}, or set .*servers\.sleep=false"
    ):
        samples.sleep()
    about["vllm_config"]["model_config"]["enable_sleep_mode"] = about["enable_memory_saver"] = True
    samples.sleep()


@pytest.mark.parametrize(
    ("kind", "flag"), [(VLLMServers, "--enable-sleep-mode"), (SGLangServers, "--enable-memory-saver")]
)
def test_servers_of_its_own_are_started_for_it_where_there_is_a_gpu(kind, flag, monkeypatch):
    for gpu, sleep in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        arguments = kind.arguments({}, Servers(**OPTIONS | {"count": 1, "sleep": sleep}))
        command, _ = kind.server_api(arguments).command("python", Path("m"), 8000)
        assert (flag in command) == (gpu and sleep)
