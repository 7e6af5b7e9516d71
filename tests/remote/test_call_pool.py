"""A pool of servers: which one gets a request, and when a server gets none."""

import asyncio
from types import SimpleNamespace

import pytest

from rft.remote.call_pool import CallPool, CircuitBreaker, CircuitOpen
from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.retry import BreakerOptions
from tests.reward.services.scripted_server import ScriptedServer


@pytest.fixture
def breaker():
    """A breaker after 2 failures, with pauses of 10 s, and its clock."""
    clock = SimpleNamespace(now=0.0)
    return CircuitBreaker(BreakerOptions(failures=2, pause_s=10.0), lambda: clock.now), clock


def call(breaker, answered):
    assert breaker.admits()
    breaker.end(answered, breaker.begin())


def test_only_failures_in_a_row_open_a_circuit(breaker):
    breaker, _ = breaker
    for answered in (False, True, False, True, False):
        call(breaker, answered)
    assert breaker.admits()
    call(breaker, False)
    assert not breaker.admits()


def test_an_open_circuit_admits_one_probe_which_decides(breaker):
    breaker, clock = breaker
    call(breaker, False)
    call(breaker, False)
    clock.now = 9.9
    assert not breaker.admits()
    clock.now = 10.0
    assert breaker.admits() and breaker.begin()
    assert not breaker.admits(), "one probe at a time"
    breaker.end(False, True)
    clock.now = 29.9
    assert not breaker.admits(), "the second pause is twice as long"
    clock.now = 30.0
    call(breaker, True)
    call(breaker, False)
    assert breaker.admits(), "a success ends the row of failures"
    call(breaker, False)
    clock.now = 40.0
    assert breaker.admits(), "and the pauses begin again"


def test_failures_of_older_requests_neither_prolong_the_pause_nor_end_the_probe(breaker):
    breaker, clock = breaker
    older = [breaker.begin() for _ in range(5)]
    for probe in older[:4]:
        breaker.end(False, probe)
    clock.now = 10.0
    assert breaker.admits() and breaker.begin()
    breaker.end(False, older[4])
    assert not breaker.admits()
    breaker.end(True, True)
    assert breaker.admits()


@pytest.fixture
def servers():
    started = [ScriptedServer(), ScriptedServer()]
    yield started
    for server in started:
        server.close()


def pool_of(addresses, failures=3):
    clients = [ServerClient(f"server {number}", address) for number, address in enumerate(addresses)]
    return CallPool(clients, BreakerOptions(failures=failures, pause_s=60.0))


def post(pool, texts):
    """Sends a request for each text at once; the values or errors."""

    async def one(text):
        body = {"id": text, "responses": [text], "rows": [{}]}
        return await pool.post("/score", body, lambda answer: answer["id"])

    async def all_of_them():
        return await asyncio.gather(*map(one, texts), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_requests_go_to_the_server_with_the_fewest(servers):
    texts = [str(number) for number in range(20)]
    assert post(pool_of([server.address for server in servers]), texts) == texts
    assert [len(server.requests) for server in servers] == [10, 10]


def test_a_server_that_failed_a_short_time_ago_comes_last(servers):
    servers[0].script = lambda number: 500 if number == 1 else None
    pool = pool_of([server.address for server in servers])
    for text in "abc":
        assert post(pool, [text]) == [text]
    assert [len(server.requests) for server in servers] == [1, 3]


def test_a_refusal_for_good_is_not_sent_to_another_server(servers):
    servers[0].script = lambda number: 400
    (error,) = post(pool_of([server.address for server in servers]), ["a"])
    assert isinstance(error, RequestFailed) and "status 400" in str(error)
    assert [len(server.requests) for server in servers] == [1, 0]


def test_a_busy_server_is_none_that_fails(servers):
    servers[0].script = lambda number: 503 if number < 9 else None
    pool = pool_of([servers[0].address], failures=2)
    found = [post(pool, ["a"])[0] for _ in range(9)]
    assert all("status 503" in str(error) for error in found[:8]) and found[8] == "a"


def test_an_open_circuit_names_the_last_problems(servers):
    servers[0].script = lambda number: 500
    pool = pool_of([servers[0].address, "http://127.0.0.1:9"], failures=1)
    post(pool, ["a"])
    (error,) = post(pool, ["b"])
    assert isinstance(error, CircuitOpen)
    assert "status 500" in str(error) and "Connect call failed" in str(error) and len(servers[0].requests) == 1
