"""What the servers of a teacher are asked before a run begins."""

import asyncio
import logging
import time

import pytest

from rft.data.encode.tokenizer import characters
from rft.remote.http_client import BadResponse
from rft.rollout.server.teacher_options import ServedTeacherOptions, check_servers
from tests.conftest import SOON_S
from tests.helpers import ALPHABET, yaml_options
from tests.rollout.server.fake_teacher import ASK, FakeTeacher

WORDS = characters(alphabet=ALPHABET)
KNOWN = len(WORDS)


@pytest.fixture
def seen():
    """Examines fake servers with these options each."""
    started = []

    def look(*servers, longest=100, faults=(), **changes):
        for made in servers:
            started.append(FakeTeacher(**{"kind": "vllm", "words": WORDS, "vocabulary": KNOWN} | made))
            for path, fault in faults:
                started[-1].always[path] = fault
        waits = {"start_s": 10.0, "answer_s": 10.0, "poll_s": 0.02, "top_k": 6}
        addresses = [server.address for server in started[-len(servers) :]]
        options = yaml_options("teacher/teacher_server.yaml", addresses=addresses, **waits | changes)
        asyncio.run(check_servers(ServedTeacherOptions(**options), WORDS, longest))

    yield look
    for fake in started:
        fake.kill()


def test_servers_of_one_model_that_know_the_tokens_fit(seen):
    for kind in ASK:
        seen({"kind": kind}, {"limit": 12, "context": 101})
    seen({"context": 4}, longest=None)


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([{}, {"seed": 1}], r"teacher 1 \(\S+\) and teacher 0 \(\S+\) serve different models"),
        ([{"context": 100}], r"has a context of 100 tokens, and rows .* 100; start it with --max-model-len 101 or"),
        ([{"context": 9, "kind": "sglang"}], r"start it with --context-length 101 or more"),
        ([{"limit": 11}], r"^teacher\.top_k: teacher 0 .*12 is greater .*; start it with --max-logprobs 12 or more"),
        ([{"words": characters(alphabet="0123456789abfecd")}], r"has another tokenizer .*'cdef' instead of 'fecd'"),
    ],
)
def test_servers_that_do_not_fit_are_told_apart(seen, servers, message):
    with pytest.raises(ValueError, match=message):
        seen(*servers)


def test_one_that_cannot_say_how_it_spells_tokens_is_believed(seen, caplog):
    with caplog.at_level(logging.WARNING):
        seen({}, faults=[("/detokenize", 404)])
    assert "cannot compare its tokenizer with actor.tokenizer" in caplog.text


@pytest.mark.parametrize("fault", [503, 500, "drop", "never"])
def test_one_that_is_not_up_is_named_within_the_deadline(seen, fault):
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 waits for teacher 0 \(127.0.0.1:\d+\) to be up \(.*\), 0.1 s"):
        seen({}, faults=[("/v1/models", fault)], start_s=0.1)
    assert time.monotonic() - begun < SOON_S


def test_what_answers_otherwise_is_no_such_server(seen):
    with pytest.raises(BadResponse, match="its kind is 'somebody', which is not sglang or vllm"):
        seen({"kind": "somebody"})
    with pytest.raises(BadResponse, match=r"teacher 0 .* not JSON"):
        seen({}, faults=[("/v1/models", "garbage")])
    with pytest.raises(
        BadResponse, match=r"teacher 0 .* the log-probabilities of a text cannot be read: .*answer with logits"
    ):
        seen({}, faults=[(ASK["vllm"], "logits")])
