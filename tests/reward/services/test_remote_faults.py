"""Responses through servers that are slow, dying, lying, absent, half-answering, hanging and refusing: no score is
invented, every response has a score or a reason, and nothing hangs. All servers are real."""

import itertools
import threading
import time

import numpy as np
import pytest

from tests.conftest import SOON_S
from tests.reward.services.scripted_server import LIES, ScriptedServer, right
from tests.reward.services.test_remote import remote

REASONS = {"unreachable", "refused", "bad_response", "deadline", "circuit_open"}
BROKEN = ("hang", "die", "cut", "half_json", "no_http", 500, 503, 429)


def spoils(faults, every):
    """A script: of so many requests the last one has the next fault."""
    order = itertools.cycle(faults)
    return lambda number: next(order) if number % every == 0 else None


def dies_after(server, requests):
    """A script: the server ends in the middle of its requests."""

    def script(number):
        if number == requests:
            threading.Thread(target=server.close).start()
        return None if number < requests else "die"

    return script


def run(responses, rows_per_request, honest, **call):
    """Scores so many responses; gives those that have no score, by reason."""
    servers = [
        ScriptedServer(spoils([*LIES, "swapped"], 2 if honest else 1)),
        ScriptedServer(spoils(BROKEN, 3 if honest else 1)),
        ScriptedServer(lambda number: "slow" if honest else 500),
        ScriptedServer(),
    ]
    servers[3].script = dies_after(servers[3], responses // rows_per_request // 8)
    texts = [f"text {number * number % 7919} of {number}" for number in range(responses)]
    addresses = ["http://127.0.0.1:9", *(server.address for server in servers)]
    breaker = {"failures": 5, "pause_s": 0.1}
    reward = remote(addresses, call=call, term="a", rows_per_request=rows_per_request, breaker=breaker)
    reward.check()
    started = time.monotonic()
    found = reward.score(texts, [{"answer": "a"}] * responses)
    seconds = time.monotonic() - started
    reward.close()
    sent = sum(len(server.requests) for server in servers)
    for server in servers[:3]:
        server.close()
    assert len(found.total) == len(found.unscored) == responses
    unscored = {number: reasons["remote"] for number, reasons in enumerate(found.unscored) if reasons}
    assert set(unscored.values()) <= REASONS
    for number, (text, score) in enumerate(zip(texts, found.total.tolist(), strict=True)):
        assert score != score if number in unscored else score == np.float32(right(text))
    assert sent > responses / rows_per_request or not honest, "some requests were repeated"
    return unscored, seconds


def test_one_honest_server_is_enough_for_nearly_every_score():
    unscored, seconds = run(4000, 20, True, concurrency=8, deadline_s=0.5, tries=3)
    assert len(unscored) <= 400 and seconds < 2 * SOON_S


@pytest.mark.slow
def test_without_an_honest_server_nearly_nothing_has_a_score():
    unscored, seconds = run(2000, 20, False, concurrency=8, deadline_s=0.5, tries=2)
    assert len(unscored) >= 1500 and len(set(unscored.values())) >= 2 and seconds < 2 * SOON_S


@pytest.mark.slow
def test_a_hundred_thousand_responses_get_no_invented_score():
    unscored, seconds = run(100_000, 50, True, concurrency=16, deadline_s=1.0, tries=3)
    assert len(unscored) <= 5000 and seconds < 8 * SOON_S
