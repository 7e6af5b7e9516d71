"""Answers of isolated workers: what is read, and what a worker may not write."""

import pytest
import torch

from rft.reward.sandbox.workers.worker import decode, encode
from rft.reward.term import Failure, Unscored
from rft.sanitize import SHOWN


def through(value):
    return decode(encode(value))


SAME = [0.1 + 0.2, -0.0, 1e-320, 2**53 + 1, True, None, [1.0, None], {"score": 0.1, "n": 7}, Unscored("none: x")]


@pytest.mark.parametrize("value", SAME)
def test_values_arrive_bit_for_bit(value):
    assert repr(through(value)) == repr(value)


def test_numbers_of_torch_are_numbers_and_other_objects_are_none():
    assert through([torch.tensor(0.1), torch.tensor([1.0, 2.0]), "1", object(), 10**400]) == [
        float(torch.tensor(0.1)), None, None, None, 10**400
    ]  # fmt: skip
    assert through({"score": 1.0, "text": "x"}) == {"score": 1.0, "text": None}


def test_a_failure_keeps_its_reason_and_message_and_no_error():
    assert through(Failure("KeyError", "KeyError: 'a'", KeyError("a"))) == Failure("KeyError", "KeyError: 'a'")


BAD = [b"", b"{", b"\x80", b'"1"', b"{}", b'{"a": 1}', b'{"unscored": 3}', b'{"failure": ["a"]}', b'{"failure": 3}']
BAD += [
    b"[[1]]",
    b'{"numbers": [1]}',
    b'{"numbers": {"a": "b"}}',
    b'{"numbers": {"a": [1]}}',
    b"[" * 10**5,
    b"9" * 5000,
]
BAD += [b'{"unscored": "a", "failure": ["a", "b"]}', b'{"py/object": "os.system"}']


@pytest.mark.parametrize("answer", BAD)
def test_a_malformed_answer_is_a_failure(answer):
    found = decode(answer)
    assert isinstance(found, Failure) and found.reason == "bad_answer"


def test_messages_hold_no_characters_that_a_terminal_interprets():
    assert decode(encode(Failure("a\x1b", "b\x1b[2J\n" + "x" * 10**5))) == Failure("a ", "b [2J " + "x" * (SHOWN - 6))
    assert decode(encode(Unscored("a\n: b"))).reason == "a : b"
