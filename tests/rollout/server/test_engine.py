"""Sampling with servers that do what they should not."""

import logging
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from rft.batch.encoded import EncodedText, RawText
from rft.distributed import start
from rft.registry import convert
from rft.remote.server_process import free_port
from rft.rollout.engine.base import Request
from rft.rollout.engine.expanded import OtherPrompt
from rft.rollout.server.options import Servers
from rft.rollout.server.sglang import SGLangServers
from rft.rollout.server.vllm import VLLMServers
from tests.conftest import SOON_S
from tests.families import family
from tests.helpers import engine_context
from tests.remote.test_process_supervisor import await_that
from tests.rollout.server.fake_server import FakeServer
from tests.rollout.server.scripted import ASK, OPTIONS, SAMPLING, Announced, plain_model, requests, right, said, weights
from tests.rollout.word_models import word_tokenizer

FAULTS = ["drop", "lose", "twice", "late", "garbage", "no http", "cut", "corrupt", 429, 503, 500, "never", "old", "nan"]
FAULTS += ["long", "abort"]
IN_THE_ANSWER = ("old", "nan", "long", "abort")  # which each kind of server words in its own way


def by_kind(faults):
    """Both kinds of servers with each fault; those of HTTP, which both kinds share, are slow with the second kind."""
    slow = {fault: [] if fault in IN_THE_ANSWER else [pytest.mark.slow] for fault in faults}
    cases = [pytest.param("vllm", fault) for fault in faults]
    cases += [pytest.param("sglang", fault, marks=slow[fault]) for fault in faults]
    return pytest.mark.parametrize(("kind", "fault"), cases, indirect=["kind"])


def synced(engine, kind, servers, version=1, **changes):
    """An engine whose servers have the weights of a version."""
    made = engine(kind, servers, **changes)
    made.update_weights(version, weights(version).items())
    return made


def test_every_sample_comes_once_and_in_order(kind, fakes, engine):
    servers = fakes()
    samples = engine(kind, servers)
    for version in (0, 1):
        samples.update_weights(version, weights(version).items())
        found = samples.generate(requests(), SAMPLING, seen := Announced())
        assert said(found) == right(requests(), version)
        assert {stamp for group in found for row in group for stamp in row.versions} == {version}
        assert seen.all_once()
    assert all(server.samples for server in servers), "both work"
    assert set((servers[0].samples + servers[1].samples).values()) == {2}, "once a version"
    assert samples.health() == {"retries": 0.0, "hedged": 0.0}


@pytest.mark.parametrize("kind", [VLLMServers, SGLangServers])
def test_a_request_excludes_the_ids_that_have_no_token(kind, fakes, tmp_path):
    """The model has 40 rows for 37 words."""
    servers = Servers(**OPTIONS | {"addresses": [server.address for server in fakes(1)]})
    merged = {"merge_lora": True} if kind is VLLMServers else {}
    context = engine_context(plain_model(), word_tokenizer(37), tmp_path, start("cpu"))
    with closing(kind(kind.Options(servers=servers, **merged), context)) as engine:
        [request] = engine._sample_requests(Request([3], [1]), SAMPLING)
    body = request.call(engine._servers[0].client).body
    assert body["sampling_params"]["logit_bias"] == {37: -1e9, 38: -1e9, 39: -1e9}


def test_servers_get_the_names_of_checkpoints(kind, fakes, engine):
    policy = family("llava").model()
    samples = engine(kind, fakes(1), model=policy)
    samples.update_weights(1, policy.state_dict().items())
    written = samples._weight_store.kept
    assert "language_model.model.norm.weight" in written.tensors and len(written.tensors) == len(policy.state_dict())
    assert torch.equal(written.read("language_model.lm_head.weight"), policy.lm_head.weight)


def test_samples_have_texts_limits_and_ends(kind, fakes, engine):
    samples = synced(engine, kind, fakes(1))
    asked = [replace(requests()[0], limits=[1, 3, 8, 8])]
    [group] = samples.generate([*asked, replace(asked[0], seeds=[])], SAMPLING)[:1]
    for row, limit in zip(group, asked[0].limits, strict=True):
        assert len(row.tokens) <= limit and len(row.versions) == len(row.tokens)
        assert row.finish_reason == ("stop" if row.tokens[-1] == 2 else "length")
        assert row.text == " ".join(f"w{token}" for token in row.tokens if token != 2)


def test_a_token_beyond_the_vocabulary_reaches_no_server(kind, fakes, engine):
    servers = fakes(1)
    samples = synced(engine, kind, servers)
    with pytest.raises(AssertionError, match="beyond the vocabulary"):
        samples.generate([replace(requests()[0], prompt=[4, 40])], SAMPLING)
    assert not servers[0].samples


def test_a_server_must_return_the_expanded_prompt_of_media(kind, fakes, engine):
    samples = synced(engine, kind, fakes(1))
    prompt = EncodedText([5, 9, 9, 7], raw=RawText([5, 9, 7], {}))
    with pytest.raises(OtherPrompt, match=r"prompt 0: .* position 0.*the end of the prompt for the engine"):
        samples.generate([replace(requests()[0], prompt=prompt)], SAMPLING)


@by_kind(FAULTS)
def test_every_sample_comes_once_where_a_server_fails_now_and_then(kind, fakes, engine, fault):
    servers = fakes()
    samples = synced(engine, kind, servers, concurrency=2, answer_s=0.6 if fault == "never" else 10.0)
    servers[0].faults[ASK[kind]] = [None, fault, None, fault]
    servers[1].faults[ASK[kind]] = [fault]
    seen = Announced()
    assert said(samples.generate(requests(), SAMPLING, seen)) == right(requests(), 1)
    assert seen.all_once()
    assert (samples.health()["retries"] > 0) == (fault not in ("late", "twice", 429, 503)), "busy is no failure"


@by_kind(["drop", "garbage", 503, "never", "old"])
def test_every_sample_comes_once_where_one_server_always_fails(kind, fakes, engine, fault):
    servers = fakes()
    patience = {"answer_s": 0.6} if fault == "never" else {"answer_s": 10.0, "retries": 1}
    samples = synced(engine, kind, servers, **patience)
    servers[0].always[ASK[kind]] = fault
    assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 1)
    assert sum(servers[1].samples.values()) >= 24


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.slow] if fault in (429, "never") else [])
        for fault in FAULTS
        if fault not in ("late", "twice")
    ],
)
def test_a_server_that_always_fails_is_named_within_a_deadline(fakes, engine, fault):
    [server] = fakes(1)
    samples = synced(engine, "vllm", [server], answer_s=0.4, retries=1)
    server.always[ASK["vllm"]] = fault
    begun = time.monotonic()
    with pytest.raises(OSError, match=rf"rank 0 gives up on 4 samples after 2 .*server 0 \({server.address}\)"):
        samples.generate(requests(1), SAMPLING)
    assert time.monotonic() - begun < SOON_S


def test_a_wait_for_servers_that_are_gone_ends_with_their_names(kind, fakes, engine):
    servers = fakes()
    samples = synced(engine, kind, servers, start_s=0.1)
    for server in servers:
        server.kill()
    waits = "rank 0 waits for a server that serves version 1 "
    with pytest.raises(TimeoutError, match=rf"{waits}\(server 0 \({servers[0].address}\).*server 1 .*, 0.1 s"):
        samples.generate(requests(), SAMPLING)


def test_nothing_is_lost_or_doubled_where_a_server_is_killed_in_the_middle(kind, fakes, engine):
    servers = fakes()
    samples = synced(engine, kind, servers)
    for server in servers:
        server.seconds = 0.05
    seen = Announced(9, lambda: threading.Thread(target=servers[0].kill).start())
    assert said(samples.generate(requests(10), SAMPLING, seen)) == right(requests(10), 1)
    assert seen.all_once(10)
    assert servers[0].samples, "it was at work"


def test_a_server_that_comes_back_with_old_weights_is_given_the_current_ones_before_it_is_asked(kind, fakes, engine):
    servers = fakes()
    samples = synced(engine, kind, servers)
    servers[0].kill()
    samples.update_weights(2, weights(2).items())
    back = FakeServer(servers[0].port, version="1", weights=77)
    try:
        servers[1].kill()  # so that only the one that is back can answer
        assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 2)
        assert sum(back.samples.values()) == 24
    finally:
        back.kill()


def test_groups_are_kept_together_and_spread_evenly(kind, fakes, engine):
    servers = fakes(3)
    samples = synced(engine, kind, servers, concurrency=100)
    for server in servers:
        server.seconds = 0.05
    samples.generate(requests(12), SAMPLING)
    prompts = [{prompt for prompt, _ in server.samples} for server in servers]
    assert sum(map(len, prompts)) == 12, "no prompt is on two servers"
    assert {len(there) for there in prompts} == {4}


def test_concurrency_goes_down_where_a_server_is_busy_and_up_again(kind, fakes, engine):
    [server] = fakes(1)
    samples = synced(engine, kind, [server], concurrency=16, answer_s=5.0)
    server.seconds, server.capacity = 0.01, 4
    [known] = samples._servers
    assert said(samples.generate(requests(12), SAMPLING)) == right(requests(12), 1)
    assert server.most == 4 and known.window < 12
    server.capacity = 100
    assert said(samples.generate(requests(36), SAMPLING)) == right(requests(36), 1)
    assert known.window > 12 and 4 < server.most <= 16


def late_soon(monkeypatch):
    """Announced samples, from the first of which on (all servers are probed by then) groups are late soon."""
    return Announced(1, lambda: monkeypatch.setattr("rft.remote.load_balancer.LATE_S", 0.1))


def test_groups_of_a_slow_server_are_taken_over(kind, fakes, engine, monkeypatch):
    slow, quick = fakes()
    samples = synced(engine, kind, [slow, quick], answer_s=600.0)
    slow.always[ASK[kind]] = "never"
    seen = late_soon(monkeypatch)
    assert said(samples.generate(requests(8), SAMPLING, seen)) == right(requests(8), 1)
    assert samples.health() == {"retries": 0.0, "hedged": 2.0}
    assert samples.health()["hedged"] == 0.0, "since the last call"


def test_a_sample_that_two_servers_answer_is_taken_once(kind, fakes, engine, monkeypatch):
    slow, quick = fakes()
    samples = synced(engine, kind, [slow, quick], answer_s=600.0)
    seen = late_soon(monkeypatch)

    def after_both():
        await_that(lambda: slow.samples)
        time.sleep(0.2)  # in which the answer arrives

    # Its first answer comes when the other one has it already.
    slow.faults[ASK[kind]] = [lambda: await_that(lambda: len(seen) > 4), "never", "never", "never"]
    quick.faults[ASK[kind]] = [None, None, None, None, None, after_both, after_both, after_both]
    assert said(samples.generate(requests(2), SAMPLING, seen)) == right(requests(2), 1)
    assert seen.all_once(2) and slow.samples and samples.health()["hedged"] == 1.0


def test_long_waits_are_logged_with_their_names(fakes, engine, caplog, monkeypatch):
    monkeypatch.setattr("rft.waits.SAY_AFTER_S", 0.1)
    monkeypatch.setattr("rft.waits._due", {})
    [server] = fakes(1)
    samples = synced(engine, "vllm", [server])
    server.seconds = 0.25
    with caplog.at_level(logging.WARNING):
        samples.generate(requests(1), SAMPLING)
    assert f"rank 0 has 0 of 4 samples (server 0 ({server.address}): 4 running), 0 s" in caplog.messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": ["http://a:1"]}, r"addresses: 'http://a:1' is not an address; expected host:port"),
        ({"addresses": ["a:1", "a:1"]}, r"addresses=.* an address is repeated"),
        ({"addresses": ["a:1"], "count": 2}, r"count=2, addresses=\['a:1'\]: give"),
        ({}, r"count=0, addresses=\[\]: give"),
        ({"count": 1, "concurrency": 0}, r"\.concurrency=0: it must be at least 1"),
        ({"count": 1, "retries": -1}, r"\.retries=-1: it must be at least 0"),
        ({"count": 1, "deltas": True}, r"deltas=true: .* set rollout\.engine\.servers\.transport=group"),
        (
            {"count": 1, "transport": "group", "deltas": True, "sleep": True},
            r"deltas=true: .*set .*servers\.sleep=false",
        ),
        ({"count": 1, "transport": "ipc", "deltas": True}, r"deltas=true: .* set .*servers\.transport=group"),
        ({"count": 1, "sync_s": 0.0}, r"\.sync_s=0\.0: it must be above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=rf"^rollout\.engine\.servers.*{message}"):
        convert(OPTIONS | changes, Servers, "rollout.engine.servers")


def test_ports_are_free():
    assert free_port() != free_port()
