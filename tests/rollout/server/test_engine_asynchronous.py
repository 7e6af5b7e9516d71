"""Samples that run while new weights arrive: every token has the log-probability of the weights of its label."""

import threading
from contextlib import closing
from dataclasses import asdict

import pytest
import torch

from rft.distributed import start
from rft.rollout.engine.base import Begun, Request
from rft.rollout.server.vllm import VLLMApi
from tests.conftest import SOON_S
from tests.remote.test_process_supervisor import await_that
from tests.rollout.server.fake_server import FakeServer, answer_of, logprob_of
from tests.rollout.server.scripted import ASK, SAMPLING, make_engine, weights

LONG = SAMPLING.__class__(**{**vars(SAMPLING), "max_new_tokens": 30})


@pytest.fixture(params=["recompute", "abort"])
def engine(request, fakes, tmp_path):
    """An engine of two servers whose tokens take 2 ms."""
    servers = fakes(2)
    for server in servers:
        server.token_s = 0.002
    with closing(make_engine(start("cpu"), VLLMApi({}), tmp_path, servers, while_updating=request.param)) as made:
        made.fakes, made.way = servers, request.param
        yield made


def update(engine, version):
    """Updates the weights; returns what the servers have then."""
    engine.update_weights(version, weights(version).items())
    [held] = {server.weights for server in engine.fakes}
    return held


def test_every_token_has_the_weights_of_its_label(engine):
    """Threads sample all the time, and twelve versions arrive."""
    found, errors, ended = [], [], threading.Event()
    held = {1: update(engine, 1)}

    def sample(number):
        try:
            while not ended.is_set():
                asked = Request([3 + number, 4], [number, number + 100], order=number)
                oldest = engine.version
                [group] = engine.generate([asked], LONG)
                found.extend((asked.prompt, row, oldest) for row in group)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=sample, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for version in range(2, 14):
        before = len(found)
        held[version] = update(engine, version)
        await_that(lambda before=before: len(found) > before or errors)
    ended.set()
    for thread in threads:
        thread.join(SOON_S)
    assert not errors and len(found) > 20
    mixed = 0
    for prompt, row, oldest in found:
        assert row.versions == sorted(row.versions) and row.versions[0] >= oldest
        assert len(row.tokens) <= 30 and row.finish_reason == ("stop" if row.tokens[-1] == 2 else "length")
        for place, version in enumerate(row.versions):
            assert row.logprobs[place] == logprob_of(prompt + row.tokens[: place + 1], held[version])
        mixed += len(set(row.versions)) > 1
    assert mixed > 2, "samples of several versions"
    assert engine.health()["retries"] == 0, "an update is no failure of a server"
    if engine.way == "abort":
        assert all(server.aborts > 4 for server in engine.fakes)


def test_requests_of_a_lower_order_come_first(engine):
    """An evaluation does not wait behind the groups that train later."""
    update(engine, 1)
    for server in engine._servers:
        server.window = 1.0
    for fake in engine.fakes:
        fake.paused = True
    done, threads = [], []

    def sample(order):
        engine.generate([Request([5], [order % 7], order=order)], LONG)
        done.append(order)

    def begun(count):
        return lambda: len(engine._balancer._rounds) + len(done) >= count

    for count, order in enumerate((50, 51, 52, 53, 54, 55, -1), start=1):
        threads.append(threading.Thread(target=sample, args=(order,)))
        threads[-1].start()
        await_that(begun(count))
    for fake in engine.fakes:
        fake.paused = False
    for thread in threads:
        thread.join(SOON_S)
    assert done.index(-1) < 5 and len(done) == 7, "two are at the servers when it comes, and two more may end with it"


def test_abort_ends_the_sampling_of_other_threads(engine):
    update(engine, 1)
    for server in engine.fakes:
        server.token_s = 10.0
    errors = []

    def sample():
        with pytest.raises(OSError, match="given up"):
            engine.generate([Request([5], [1])], LONG)
        errors.append(True)

    thread = threading.Thread(target=sample)
    thread.start()
    await_that(lambda: sum(server.running for server in engine.fakes) == 1)
    engine.abort()
    thread.join(SOON_S)
    assert errors == [True]


def test_a_server_that_dies_in_the_middle_loses_no_sample(engine):
    update(engine, 1)
    found = []

    def sample(number):
        found.extend(engine.generate([Request([6, 3 + number], [number, 9])], LONG))

    threads = [threading.Thread(target=sample, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    await_that(lambda: engine.fakes[0].running > 0)
    engine.fakes[0].kill()
    held = torch.tensor([engine.fakes[1].weights])
    for thread in threads:
        thread.join(SOON_S)
    assert len(found) == 4 and all(len(group) == 2 for group in found) and held.numel() == 1


def in_order(begun):
    return sorted(begun, key=lambda one: one.identity)


def test_another_engine_continues_what_had_begun(engine, fakes, tmp_path):
    """A group of which one sample ends at once and the other never does, until a version arrives in its middle."""
    held = {1: update(engine, 1)}
    asked, errors = Request([7, 8], [4, 5], order=3), []
    first, second = (answer_of(asked.prompt, seed, 30, 0)[0] for seed in asked.seeds)
    assert len(first) < 10 < len(second)
    for server in engine.fakes:
        server.hold_at = 10

    def sample():
        with pytest.raises(OSError, match="given up"):
            engine.generate([asked], LONG)
        errors.append(True)

    thread = threading.Thread(target=sample)
    thread.start()
    await_that(lambda: any(server.held for server in engine.fakes) and len(engine.begun()) == 1)
    held[2] = update(engine, 2)
    begun = engine.begun()
    engine.abort()
    thread.join(SOON_S)
    assert errors == [True] and {one.order for one in begun} == {3}
    known = sorted((one.tokens, one.finish_reason) for one in begun)
    partial = [(second[:10], None)] if engine.way == "abort" else []
    assert known == sorted([(first, "stop"), *partial])

    [other] = fakes(1)
    with closing(make_engine(start("cpu"), VLLMApi({}), tmp_path / "new", [other], while_updating=engine.way)) as new:
        new.update_weights(2, weights(2).items())
        new.continue_from([Begun(**asdict(one)) for one in begun])
        assert in_order(new.begun()) == in_order(begun), "a checkpoint before they are asked for has them, too"
        [group] = new.generate([asked], LONG)
        known = [(one.order, one.tokens, one.versions, one.finish_reason) for one in in_order(new.begun())]
        ends = [(3, row.tokens, row.versions, row.finish_reason) for row in group]
        assert sorted(known) == sorted(ends), "and one before they are scored"
        new.ended(3)
        assert new.begun() == []
        assert [row.tokens[:10] for row in group] == [first, second[:10]] and len(group[1].tokens) > 10
        assert group[1].versions[:10] == ([1] * 10 if engine.way == "abort" else [2] * 10)
        for row in group:
            for place, version in enumerate(row.versions):
                assert row.logprobs[place] == logprob_of(asked.prompt + row.tokens[: place + 1], held[version])
        assert sum(other.samples.values()) == 1, "the complete sample is not asked for"
        assert ((7, 8, *second[:10]) in {prompt for prompt, _ in other.samples}) == (engine.way == "abort")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recompute", "abort"])
def test_faults_in_the_middle_lose_no_sample(way, fakes, tmp_path):
    """While versions arrive, a server fails in many ways, hangs, dies, and comes back with other weights."""
    servers = fakes(2)
    with closing(make_engine(start("cpu"), VLLMApi({}), tmp_path, servers, while_updating=way, answer_s=6.0)) as engine:
        found, errors, ended, held = [], [], threading.Event(), {}

        def sample(number):
            try:
                while not ended.is_set():
                    asked = Request([3 + number, 4], [number, number + 100], order=number)
                    found.extend((asked.prompt, row) for row in engine.generate([asked], LONG)[0])
            except OSError as error:
                errors.append(error)

        def next_version():
            """Some samples and a version later."""
            before = len(found)
            if held:
                await_that(lambda: len(found) >= before + 4 or errors)
            version = engine.version + 1
            engine.update_weights(version, weights(version).items())
            held[version] = servers[1].weights

        next_version()
        for server in servers:
            server.token_s = 0.002
        threads = [threading.Thread(target=sample, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for fault in ("drop", "lose", "cut", "garbage", 500, 503, "twice", "late"):
            servers[0].faults[ASK["vllm"]] = [fault, None, fault]
            next_version()
        servers[0].always[ASK["vllm"]] = "never"
        next_version()
        servers[0].kill()
        next_version()
        back = FakeServer(servers[0].port, version="1", weights=77)
        back.token_s = 0.002
        try:
            next_version()
            await_that(lambda: (back.version == servers[1].version and back.running) or errors)
            next_version()
        finally:
            ended.set()
            for thread in threads:
                thread.join(SOON_S)
            back.kill()
        assert not errors and len(found) > 50 and engine.health()["retries"] > 0
        for prompt, row in found:
            for place, version in enumerate(row.versions):
                assert row.logprobs[place] == logprob_of(prompt + row.tokens[: place + 1], held[version])
