"""The load balancer with clients that answer as scripted: who gets which requests, and what becomes of failures."""

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest

from rft.remote import load_balancer
from rft.remote.http_client import RequestFailed, RequestRefused, ServerClient
from rft.remote.load_balancer import LoadBalancer
from rft.remote.retry import ServerPolicy
from rft.remote.server_requests import Call, Server

POLICY = {"concurrency": 8, "retries": 2, "start_s": 10.0, "answer_s": 10.0, "poll_s": 0.01}


@dataclass(frozen=True)
class Numbered:
    """A request that is its number."""

    number: int

    def call(self, client):
        return Call("/work", {"number": self.number})

    def read(self, client, answer):
        return answer["value"]


class Scripted(ServerClient):
    """A client without a server.

    Attributes:
        work: called with the number of a request; returns the value of the answer, or raises.
        got: the numbers of all requests so far.
        cancelled: the numbers of those that were cancelled.
    """

    def __init__(self, number, work):
        super().__init__(f"server {number}", "http://127.0.0.1:1")
        self.work = work
        self.got, self.cancelled = [], []

    async def post(self, path, body=None):
        number = body["number"]
        self.got.append(number)
        try:
            return {"value": await self.work(number)}
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise


async def at_once(number):
    return number


async def never(number):
    await asyncio.Event().wait()


def failing(error, times=1):
    """Raises an error so many times, and answers then."""
    errors = [error] * times

    async def work(number):
        if errors:
            raise errors.pop()
        return number

    return work


async def up(client):
    return None


def servers_of(*works, window=8.0):
    return [Server(Scripted(number, work), window) for number, work in enumerate(works)]


def balance(servers, groups, probe=up, on_result=None, **changes):
    """The results of groups of numbers, and the counts."""
    counts = Counter()
    balancer = LoadBalancer(
        who="rank 0",
        what="number",
        wanted="is up",
        servers=servers,
        probe=probe,
        policy=ServerPolicy(**POLICY | changes),
        key="here",
        counts=counts,
    )
    return asyncio.run(balancer.run([[Numbered(number) for number in group] for group in groups], on_result)), counts


def got(servers):
    return [server.client.got for server in servers]


def test_a_group_goes_to_the_server_with_the_fewest_requests():
    gate, seen = asyncio.Event(), []

    async def together(number):
        """No answer comes before all requests are out, so that the loads only grow."""
        seen.append(number)
        if len(seen) == 9:
            gate.set()
        await gate.wait()
        return number

    servers = servers_of(together, together, together)
    balance(servers, [[0, 1, 2], [3], [4], [5, 6], [7], [8]])
    # Loads before each group: 0 0 0, 3 0 0, 3 1 0, 3 1 1, 3 3 1, 3 3 2; the first of equal ones gets it.
    assert got(servers) == [[0, 1, 2], [3, 5, 6], [4, 7, 8]]
    assert [server.running for server in servers] == [0, 0, 0]


def test_results_come_in_the_order_of_the_requests_whatever_the_order_of_the_answers():
    answered, seen = [], []
    turns = [asyncio.Event() for _ in range(6)]

    async def backwards(number):
        """Answers 5, then 4, and so on."""
        if number < 5:
            await turns[number + 1].wait()
        turns[number].set()
        answered.append(number)
        return 10 * number

    def on_result(group, request, result):
        seen.append((group, request, result))

    groups = [[0, 1], [], [2], [3, 4, 5]]
    found, counts = balance(servers_of(backwards, backwards), groups, on_result=on_result)
    assert found == [[0, 10], [], [20], [30, 40, 50]]
    assert answered == [5, 4, 3, 2, 1, 0] and seen[0] == (3, 2, 50) and seen[-1] == (0, 0, 0) and len(seen) == 6
    assert not counts


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_the_function_for_results_ends_the_round(failing):
    """Also that of the last result."""

    def on_result(group, request, result):
        if group == failing:
            raise ValueError(f"group {group}")

    with pytest.raises(ValueError, match=f"group {failing}"):
        balance(servers_of(at_once), [[0], [1], [2]], on_result=on_result)


def test_nothing_is_sent_for_no_requests():
    servers = servers_of(at_once)
    assert balance(servers, [[], []])[0] == [[], []] and got(servers) == [[]]


def test_a_server_gets_no_more_requests_than_its_window_but_for_one_group():
    running, most = set(), []
    gate = asyncio.Event()

    async def work(number):
        running.add(number)
        most.append(sorted(running))
        if number == 4:
            gate.set()
        if number < 3:
            await gate.wait()
        running.discard(number)
        return number

    [server] = servers = servers_of(work, window=4.0)
    balance(servers, [[0, 1, 2], [3, 5], [4]], concurrency=4)
    assert most[:4] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 4]], "3 + 2 requests exceed 4, and 3 + 1 do not"
    assert server.client.got == [0, 1, 2, 4, 3, 5]
    assert balance(servers_of(at_once, window=2.0), [[0, 1, 2, 3, 4]], concurrency=2)[0] == [[0, 1, 2, 3, 4]]


def first_probe_only():
    """A probe that finds server 0 up the first time only, and server 1 always."""
    asked = Counter()

    async def probe(client):
        asked[client.name] += 1
        return None if client.name == "server 1" or asked[client.name] == 1 else "it is down"

    return probe


def test_the_requests_that_failed_are_sent_to_another_server(caplog):
    async def fails_at_one(number):
        if number == 1:
            raise RequestFailed("server 0: it broke")
        return number

    servers = servers_of(fails_at_one, at_once)
    found, counts = balance(servers, [[0, 1, 2]], probe=first_probe_only())
    assert found == [[0, 1, 2]] and got(servers) == [[0, 1, 2], [1]]
    assert counts == {"retries": 1}
    assert caplog.messages == ["server 0: it broke; its numbers are requested again"]
    assert not servers[0].ready


def test_an_answer_that_cannot_be_read_is_a_failure(caplog):
    class Empty(Scripted):
        async def post(self, path, body=None):
            await super().post(path, body)
            return {}

    servers = servers_of(at_once, at_once)
    servers[0] = Server(Empty(0, at_once), 8.0)
    found, counts = balance(servers, [[0]])
    assert found == [[0]] and got(servers) == [[0], [0]] and counts == {"retries": 1}
    assert "server 0: the answer to a number cannot be read: KeyError('value')" in caplog.text


def test_a_failed_group_goes_to_a_server_that_failed_at_it_less_often():
    """Both fail once, so the group visits both before it comes to one of them again."""
    servers = servers_of(failing(RequestFailed("server 0: x")), failing(RequestFailed("server 1: x")))
    found, counts = balance(servers, [[0]])
    assert found == [[0]] and counts == {"retries": 2}
    assert sum(map(len, got(servers))) == 3 and min(map(len, got(servers))) == 1


def test_a_group_that_fails_too_often_ends_the_round():
    message = r"^rank 0 gives up on 2 numbers after 3 failures \(here\.retries=2\); the last: server 0: x$"
    servers = servers_of(failing(RequestFailed("server 0: x"), times=9))
    with pytest.raises(RequestFailed, match=message):
        balance(servers, [[0, 1]])
    assert got(servers) == [[0, 1] * 3]


def test_an_error_of_the_program_is_raised_at_once():
    servers = servers_of(failing(AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        balance(servers, [[0]])
    assert got(servers) == [[0]]


def test_a_server_that_is_down_gets_nothing_until_a_probe_succeeds():
    back = asyncio.Event()
    probes = Counter()

    async def probe(client):
        probes[client.name] += 1
        if client.name == "server 0" and probes[client.name] < 4:
            raise RequestFailed("server 0: connection refused")

    async def waits_for_the_other(number):
        await back.wait()
        return number

    async def returns(number):
        back.set()
        return number

    servers = servers_of(returns, waits_for_the_other, window=1.0)
    found, counts = balance(servers, [[0], [1]], probe=probe, concurrency=1)
    assert found == [[0], [1]] and got(servers) == [[1], [0]], "the first group goes to the only server that is up"
    assert probes["server 0"] == 4 and not counts


def test_a_server_with_a_problem_gets_nothing():
    async def probe(client):
        return "serves version 3" if client.name == "server 0" else None

    servers = servers_of(at_once, at_once)
    assert balance(servers, [[number] for number in range(5)], probe=probe)[0] == [[0], [1], [2], [3], [4]]
    assert got(servers) == [[], [0, 1, 2, 3, 4]] and servers[0].problem == "serves version 3"


def test_a_wait_for_servers_that_are_all_down_ends_with_their_problems():
    async def probe(client):
        return f"problem of {client.name}"

    message = r"waits for a server that is up \(server 0: problem of server 0, server 1: problem of server 1\), 0\.1 s$"
    with pytest.raises(TimeoutError, match=message):
        balance(servers_of(at_once, at_once), [[0]], probe=probe, start_s=0.1)


def test_a_slow_probe_delays_the_round_no_longer_than_its_limit(monkeypatch):
    monkeypatch.setattr(load_balancer, "LATE_S", 0.05)

    async def probe(client):
        if client.name == "server 0":
            await never(0)

    servers = servers_of(at_once, at_once)
    assert balance(servers, [[0], [1]], probe=probe)[0] == [[0], [1]]
    assert got(servers) == [[], [0, 1]]


def test_a_busy_server_gets_half_as_many_requests_and_no_failure():
    [server] = servers = servers_of(failing(RequestRefused("server 0: busy", 503)))
    found, counts = balance(servers, [[0]])
    assert found == [[0]] and not counts
    assert server.window == 4.25  # 8 / 2 + 1 / 4
    balance(servers, [[1]])
    assert server.window == 4.25 + 1 / 4.25, "windows are kept from round to round"
    for _ in range(40):
        balance(servers, [[2]])
    assert server.window == 8.0, "the concurrency of the policy"


def test_refusals_during_a_pause_count_once():
    [server] = servers = servers_of(failing(RequestRefused("server 0: busy", 503), times=2))
    assert balance(servers, [[0], [1]])[0] == [[0], [1]]
    assert server.window == 4.25 + 1 / 4.25, "halved once, then two answers"


def test_a_late_answer_halves_the_window_and_is_a_failure():
    works = iter((never, at_once))
    [server] = servers = servers_of(lambda number: next(works)(number))
    found, counts = balance(servers, [[0]], answer_s=0.5)
    assert found == [[0]] and counts == {"retries": 1} and server.window == 4.25


def test_an_idle_server_takes_over_a_late_group(monkeypatch):
    monkeypatch.setattr(load_balancer, "LATE_S", 0.0)
    monkeypatch.setattr(load_balancer, "LATE", 0.0)
    servers = servers_of(never, at_once)
    found, counts = balance(servers, [[0, 1], [2]])
    assert found == [[0, 1], [2]] and counts == {"hedged": 1}
    assert got(servers) == [[0, 1], [2, 0, 1]] and servers[0].client.cancelled == [0, 1]
    assert [server.running for server in servers] == [0, 0]


def test_a_server_does_not_take_over_a_late_group_that_has_just_failed_on_it(monkeypatch):
    monkeypatch.setattr(load_balancer, "LATE_S", 0.0)
    monkeypatch.setattr(load_balancer, "LATE", 0.0)
    fails = failing(RequestFailed("server 0: gone"))

    async def work(number):
        if number == 1:
            await asyncio.sleep(0.05)
            return await fails(number)
        return number

    servers = servers_of(work)
    found, counts = balance(servers, [[0], [1, 2]])
    assert found == [[0], [1, 2]]
    assert counts == {"retries": 1} and got(servers) == [[0, 1, 2, 1]]


def test_no_group_is_late_before_the_limit(monkeypatch):
    monkeypatch.setattr(load_balancer, "LATE_S", 1000.0)
    rest = asyncio.Event()

    async def slow(number):
        await rest.wait()
        return number

    async def quick(number):
        asyncio.get_running_loop().call_later(0.3, rest.set)  # three looks for late groups
        return number

    servers = servers_of(slow, quick)
    found, counts = balance(servers, [[0], [1]])
    assert found == [[0], [1]] and not counts and got(servers) == [[0], [1]]


def test_of_two_answers_to_a_request_the_first_is_taken(monkeypatch):
    monkeypatch.setattr(load_balancer, "LATE_S", 0.0)
    monkeypatch.setattr(load_balancer, "LATE", 0.0)
    first, second = asyncio.Event(), asyncio.Event()
    seen = []

    async def slow(number):
        """Answers 0 after the other server has, and 1 never."""
        await (first if number == 0 else asyncio.Event()).wait()
        asyncio.get_running_loop().call_soon(second.set)
        return "late"

    async def quick(number):
        """Answers 1 after the slow server has answered 0."""
        if number == 1:
            await second.wait()
        return "early"

    def on_result(group, request, result):
        seen.append((group, request, result))
        if len(seen) == 2:
            first.set()

    servers = servers_of(slow, quick)
    found, counts = balance(servers, [[0, 1], [2]], on_result=on_result)
    assert found == [["early", "early"], ["early"]]
    assert sorted(seen) == [(0, 0, "early"), (0, 1, "early"), (1, 0, "early")]
    assert counts == {"hedged": 1} and servers[0].client.cancelled == [1]
