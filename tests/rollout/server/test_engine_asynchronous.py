"""Samples that run while new weights arrive: every token has the log-probability of the weights of its label."""

import threading
from contextlib import closing

import pytest
import torch

from rft.distributed import start
from rft.rollout.engine.base import Request
from rft.rollout.server.vllm import VLLMApi
from tests.conftest import SOON_S
from tests.remote.test_process_supervisor import await_that
from tests.rollout.server.fake_server import logprob_of
from tests.rollout.server.scripted import SAMPLING, make_engine, weights

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
    """Threads sample all the time, and forty versions arrive."""
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
    for version in range(2, 42):
        before = len(found)
        held[version] = update(engine, version)
        await_that(lambda before=before: len(found) > before or errors)
    ended.set()
    for thread in threads:
        thread.join(SOON_S)
    assert not errors and len(found) > 60
    mixed = 0
    for prompt, row, oldest in found:
        assert row.versions == sorted(row.versions) and row.versions[0] >= oldest
        assert len(row.tokens) <= 30 and row.finish_reason == ("stop" if row.tokens[-1] == 2 else "length")
        for place, version in enumerate(row.versions):
            assert row.logprobs[place] == logprob_of(prompt + row.tokens[: place + 1], held[version])
        mixed += len(set(row.versions)) > 1
    assert mixed > 10, "samples of several versions"
    assert engine.health()["retries"] == 0, "an update is no failure of a server"
    if engine.way == "abort":
        assert all(server.aborts > 20 for server in engine.fakes)


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
