"""Every message of a weight sync is dropped, doubled, delayed, corrupted, ...: the version is committed, or an error
names the peer. Never does it hang, and never is a sample taken of other weights."""

import itertools
import logging
import re

import pytest
import torch

from rft.rollout.server.weights import store
from tests.conftest import SOON_S
from tests.remote.test_process_supervisor import await_that
from tests.rollout.server.fake_server import FakeServer
from tests.rollout.server.real_servers import until
from tests.rollout.server.scripted import ASK, SAMPLING, current, deadlines, requests, right, said, weights
from tests.rollout.server.weights.outcomes import committed, outcome

pytestmark = pytest.mark.slow

MESSAGES = {
    "vllm": [
        "/health",
        "/is_paused",
        "/weight_info",
        "/server_info?config_format=json",
        "/pause?mode=abort",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ],
    "sglang": ["/server_info", "/model_info", "/update_weights_from_disk"],
}
EVERY = [(kind, message) for kind, messages in MESSAGES.items() for message in messages]
FAULTS = ["drop", "lose", "twice", "late", "garbage", "no http", "cut", "corrupt", 503, 400, "never"]


@pytest.mark.parametrize(("kind", "message"), EVERY)
def test_a_message_that_fails_once(fakes, engine, kind, message):
    [server] = fakes(1)
    samples = engine(kind, [server], sync_s=0.3, poll_s=0.01)
    assert outcome(samples, 0) == ""
    for version, fault in enumerate(FAULTS, 1):
        calls, server.faults[message] = server.calls[message], [fault]
        assert outcome(samples, version) == "", f"{fault}: there is time to do it again"
        assert server.calls[message] > calls and committed(samples, version), fault


@pytest.mark.parametrize(("kind", "message"), EVERY)
def test_a_message_that_always_fails(fakes, engine, kind, message):
    [server] = fakes(1)
    samples = engine(kind, [server], poll_s=0.01)
    assert outcome(samples, 0) == ""
    for version, fault in enumerate(("drop", "garbage", 503, "never"), 1):
        server.always[message] = fault
        with deadlines(samples, sync_s=0.2, start_s=0.1):
            error = outcome(samples, version)
        server.always.clear()
        if error.startswith(f"server 0 ({server.address}): "):
            assert fault == "garbage", "it says no for good: no deadline is waited for"
        elif error:
            assert error.startswith(f"rank 0 waits for server 0 ({server.address}) to acknowledge version {version} (")
            assert error.endswith("), 0.3 s")
        else:
            assert committed(samples, version), f"{fault}: what it acknowledges is what it serves"


@pytest.mark.parametrize(("kind", "message"), EVERY)
def test_a_server_that_fails_is_left_behind_where_another_one_does_not(fakes, engine, kind, message):
    bad, good = fakes()
    samples = engine(kind, [bad, good], sync_s=0.3, poll_s=0.01, retries=1)
    assert outcome(samples, 0) == ""
    for version, fault in enumerate(("drop", "never", None), 1):
        bad.always[message] = fault
        assert outcome(samples, version) == "" and committed(samples, version), fault


@pytest.mark.parametrize(("kind", "message"), [("vllm", "/update_weight_version"), ("sglang", MESSAGES["sglang"][-1])])
def test_a_server_that_says_yes_and_stays_as_it_was(fakes, engine, kind, message):
    [server] = fakes(1)
    samples = engine(kind, [server], sync_s=0.3)
    assert outcome(samples, 0) == ""
    server.always[message] = "ignore"
    versions, says = (
        itertools.count(1),
        re.compile(rf"server 0 \({server.address}\) was given version \d+ and serves 0"),
    )
    with deadlines(samples, start_s=0.1):  # within which the check that finds it need not end
        await_that(lambda: says.search(outcome(samples, next(versions))))


def test_the_first_time_all_servers_must_come(kind, fakes, engine):
    good, gone = fakes()
    gone.kill()
    samples = engine(kind, [good, gone], sync_s=0.5, start_s=0.5)
    errors = []

    def good_acknowledges():
        errors.append(outcome(samples, len(errors)))
        return good.address not in errors[-1]

    await_that(good_acknowledges)
    waits = f"rank 0 waits for server 1 ({gone.address}) to acknowledge version {len(errors) - 1} (server 1"
    assert errors[-1].startswith(waits)


@pytest.mark.parametrize("fault", ["garbage", 400])
@pytest.mark.parametrize(("kind", "message"), [("vllm", "/collective_rpc"), ("sglang", MESSAGES["sglang"][-1])])
def test_a_server_that_refuses_the_first_weights_is_not_asked_for_long(fakes, engine, kind, message, fault):
    bad, good = fakes()
    samples = engine(kind, [bad, good], start_s=100.0)
    bad.always[message] = fault
    assert f"server 0 ({bad.address}): POST {message}: " in outcome(samples, 0)


class Own:
    """A process of the run's own."""

    def __init__(self, heals):
        self.heals = heals
        self.starts = 0

    def ended(self):
        return ""

    def reset_restarts(self):
        pass

    end = wait = reset_restarts

    def start(self):
        self.starts += 1
        self.heals.clear()


@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize(("kind", "message"), [("vllm", "/collective_rpc"), ("sglang", MESSAGES["sglang"][-1])])
def test_servers_that_refuse_later_weights_are_started_anew_once(fakes, engine, kind, message, helps):
    servers = fakes()
    samples = engine(kind, servers, start_s=100.0)
    assert outcome(samples, 0) == ""
    for monitor, server in zip(samples._pool._monitors, servers, strict=True):
        server.always[message] = 400
        monitor.process = Own(server.always if helps else {})
    error = outcome(samples, 1)
    assert (
        (error == "")
        if helps
        else all(f"server {n} ({s.address}): POST {message}: " in error for n, s in enumerate(servers))
    )
    if helps:
        assert outcome(samples, 2) == "" and committed(samples, 2)
        # The version counts as served once one server has it; the other one may be restarted after that.
        until(lambda: current(samples) == len(servers), SOON_S)
    assert [monitor.process.starts for monitor in samples._pool._monitors] == [1, 1]


def test_a_server_that_is_killed_between_prepare_and_commit(kind, fakes, engine, caplog):
    servers = fakes()
    samples = engine(kind, servers, sync_s=0.3)
    assert outcome(samples, 0) == ""

    def tensors():
        yield from weights(1).items()
        servers[0].kill()

    with caplog.at_level(logging.WARNING):
        samples.update_weights(1, tensors())
    assert any(f"server 0 ({servers[0].address}) did not acknowledge version 1" in text for text in caplog.messages)
    assert committed(samples, 1) and not servers[0].samples


def test_all_servers_are_killed_between_prepare_and_commit(kind, fakes, engine):
    servers = fakes()
    samples = engine(kind, servers)
    assert outcome(samples, 0) == ""
    for server in servers:
        server.kill()
    with deadlines(samples, sync_s=0.2, start_s=0.2):
        error = outcome(samples, 1)
    assert all(f"server {number} ({server.address})" in error for number, server in enumerate(servers))
    assert "to acknowledge version 1 (" in error and error.endswith(", 0.4 s")


def test_a_server_that_is_restarted_with_old_weights_is_given_the_current_ones(kind, fakes, engine):
    [server] = fakes(1)
    samples = engine(kind, [server])
    for version in (0, 1):
        assert outcome(samples, version) == ""
    server.kill()
    back = FakeServer(server.port, version="0", weights=5)
    try:
        assert committed(samples, 1)
        assert outcome(samples, 2) == "" and committed(samples, 2)
    finally:
        back.kill()


def test_a_number_of_another_run_is_not_trusted(kind, fakes, engine):
    [server] = fakes(1, version="3", weights=5)
    samples = engine(kind, [server])
    assert outcome(samples, 3) == ""
    assert committed(samples, 3)


def test_an_old_message_that_comes_late_is_noticed(kind, fakes, engine):
    """As a load of version 1 that a network kept for a while: it is carried out once version 2 is served."""
    [server] = fakes(1)
    samples = engine(kind, [server])
    for version in (1, 2):
        assert outcome(samples, version) == ""
    server.version, server.weights = "1", 5
    assert committed(samples, 2)


def spoil(folder):
    """Flips a bit of the last file of weights in a folder."""
    path = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    return path.name


def test_a_staged_file_that_is_spoilt_on_disk_is_named_before_a_server_is_told(
    kind, fakes, engine, monkeypatch, tmp_path
):
    [server] = fakes(1)
    samples = engine(kind, [server])
    assert outcome(samples, 0) == ""
    told = server.calls.copy()
    real = store.write_rows
    monkeypatch.setattr(store, "write_rows", lambda path, *given: (real(path, *given), spoil(path.parent)))
    assert "does not hold the weights of version 1 that were written to it; check the disk" in outcome(samples, 1)
    loads = {"/collective_rpc", "/update_weights_from_disk"}
    assert all(server.calls[message] == told[message] for message in loads)
    assert said(samples.generate(requests(2), SAMPLING)) == right(requests(2), 0), "version 0 is served as before"


def test_a_spoilt_file_is_not_given_to_a_server_that_is_back(kind, fakes, engine, tmp_path):
    [server] = fakes(1)
    samples = engine(kind, [server], start_s=0.5)
    assert outcome(samples, 1) == ""
    name = spoil(tmp_path / "weights" / "v1")
    server.kill()
    back = FakeServer(server.port)
    try:
        await_that(lambda: name in samples._pool._monitors[0].problem)
        with pytest.raises(TimeoutError, match=r"waits for a server that serves version 1 .*serves version None"):
            samples.generate(requests(2), SAMPLING)
        assert not back.calls["/collective_rpc"] and not back.calls["/update_weights_from_disk"]
    finally:
        back.kill()


def test_a_full_disk_ends_the_walk_over_the_weights_all_the_same(fakes, engine, monkeypatch):
    [server] = fakes(1)
    samples = engine("vllm", [server])
    walked = []

    def tensors():
        for name, tensor in weights(0).items():
            walked.append(name)
            yield name, tensor

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match=r"model-1-00001\.safetensors: \[Errno 28\] No space left on device"):
        samples.update_weights(0, tensors())
    assert walked == list(weights(0)), "other ranks gather along"


def test_a_type_that_is_not_written_ends_the_walk_all_the_same(fakes, engine):
    [server] = fakes(1)
    walked = []

    def tensors():
        for name in ("first", "second"):
            walked.append(name)
            yield name, torch.zeros(2, dtype=torch.float8_e4m3fn)

    with pytest.raises(ValueError, match=r"first: servers do not read weights of torch\.float8_e4m3fn"):
        engine("vllm", [server]).update_weights(0, tensors())
    assert walked == ["first", "second"], "other ranks gather along"


@pytest.mark.parametrize(
    ("kind", "message"),
    [("vllm", "/is_paused"), ("vllm", "/server_info?config_format=json"), ("sglang", "/model_info")],
)
def test_a_server_without_an_endpoint_is_not_waited_for(fakes, engine, kind, message):
    [server] = fakes(1)
    server.always[message] = 404
    error = outcome(engine(kind, [server], start_s=600.0, sync_s=600.0, poll_s=600.0), 0)
    assert error.startswith(f"server 0 ({server.address}): GET {message}: status 404")
    shown = error.splitlines()[-1]
    assert f"--port {server.port}" in shown and ("VLLM_SERVER_DEV_MODE=1" in shown) == (kind == "vllm")
    assert ("--enable-scale-out" in shown) == (kind == "vllm")


def test_a_server_with_another_key_is_not_waited_for(fakes, engine, kind, monkeypatch):
    [server] = fakes(1)
    server.key = "its-key"
    monkeypatch.setenv("RFT_T_KEY", "another")
    error = outcome(engine(kind, [server], start_s=600.0, sync_s=600.0, poll_s=600.0, token="RFT_T_KEY"), 0)
    assert error.startswith(f"server 0 ({server.address}): GET ") and "status 401" in error
    assert error.endswith("; rollout.engine.servers.token names the environment variable with the key of the server")
    monkeypatch.setenv("RFT_T_KEY", "its-key")
    assert outcome(engine(kind, [server], token="RFT_T_KEY"), 0) == ""


def test_a_lost_server_is_not_waited_for_again_and_comes_back(kind, fakes, engine):
    alive, dead = fakes(2)
    samples = engine(kind, [alive, dead])
    assert outcome(samples, 0) == ""
    dead.kill()
    assert outcome(samples, 1) == ""
    vars(samples.options.servers)["poll_s"] = 600.0  # between two checks; a second one would come too late
    for version in (2, 3):
        assert outcome(samples, version) == "" and committed(samples, version)
        assert current(samples) == 1
    vars(samples.options.servers)["poll_s"] = 0.02
    back = FakeServer(dead.port)
    try:
        assert outcome(samples, 4) == ""
        until(lambda: current(samples) == 2, SOON_S)
        assert committed(samples, 4)
    finally:
        back.kill()


def test_only_the_current_version_stays_on_disk(kind, fakes, engine, tmp_path):
    samples = engine(kind, fakes())
    for version in range(4):
        assert outcome(samples, version) == ""
        assert [path.name for path in (tmp_path / "weights").iterdir()] == [f"v{version}"]
    assert (tmp_path / "weights" / "v3" / "tokenizer.json").exists()
    samples.close()
    assert not (tmp_path / "weights").exists()


def test_nothing_is_sampled_before_a_server_is_synced(kind, fakes, engine):
    [server] = fakes(1)
    samples = engine(kind, [server], start_s=0.2)
    with pytest.raises(TimeoutError, match=r"a server that serves version 0 .*serves version None"):
        samples.generate(requests(1), SAMPLING)
    assert server.calls[ASK[kind]] == 0
