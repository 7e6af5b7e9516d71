"""The sampler: when its engine wakes, takes weights and sleeps."""

import pytest
import torch

from rft.rollout.engine.base import Completion, Engine, EngineFacts, EngineOptions, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import EngineSampler

SAMPLING = Sampling(4, 1.0, 1.0, 0, 0.0, [], None)


class Recorder(Engine):
    """Writes every call down; a sample is the version of the weights, and weights are read to their end."""

    def __init__(self):
        super().__init__(EngineOptions(), None)
        self.calls = []
        self.version = -1

    def generate(self, requests, sampling, on_completion=None):
        self.calls.append("generate")
        done = Completion([self.version], [0.0], "length", "", [self.version])
        if on_completion is not None:
            on_completion(0, 0, done)
        return [[done for _ in request.seeds] for request in requests]

    def update_weights(self, version, tensors):
        self.version = version
        self.calls.append(("update_weights", version, list(tensors)))

    def sleep(self):
        self.calls.append("sleep")

    def wake(self, part):
        self.calls.append(f"wake {part}")

    def abort(self):
        self.calls.append("abort")

    def health(self):
        return {"retries": 2.0}

    def close(self):
        self.calls.append("close")


@pytest.fixture
def engine():
    return Recorder()


@pytest.fixture
def sampler(engine):
    return EngineSampler(engine)


def taken(version, tensors=()):
    return ["wake weights", ("update_weights", version, list(tensors)), "wake kv_cache"]


def test_weights_are_taken_between_the_two_parts_of_waking(sampler, engine):
    sampler.publish(3, iter([("w", 1), ("v", 2)]))
    assert engine.calls == taken(3, [("w", 1), ("v", 2)])
    assert sampler.held == ("actor", 3)


@pytest.mark.parametrize("shares", [False, True])
def test_an_engine_with_memory_of_its_own_wakes_when_torch_has_returned_what_it_keeps(
    sampler, engine, monkeypatch, shares
):
    engine.facts = EngineFacts(plain_torch=shares)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.calls.append("empty"))
    sampler.publish(3, [])
    weights, update, cache = taken(3)
    assert engine.calls == ([weights, update, cache] if shares else ["empty", weights, update, "empty", cache])


def test_weights_that_the_engine_holds_are_not_read_again(sampler, engine):
    def unread():
        pytest.fail("read")
        yield

    sampler.publish(3, [])
    sampler.publish(3, unread())
    assert engine.calls == taken(3)


def test_an_engine_that_is_awake_sleeps_before_it_takes_other_weights(sampler, engine):
    """Another version, or the same number for another model: a reference is unrelated to the policy."""
    sampler.publish(3, [])
    sampler.publish(4, [])
    sampler.publish(4, [], "reference")
    assert engine.calls == [*taken(3), "sleep", *taken(4), "sleep", *taken(4)]
    assert sampler.held == ("reference", 4)


def test_an_engine_that_has_slept_takes_the_same_weights_again(sampler, engine):
    sampler.publish(3, [])
    sampler.release()
    assert sampler.held is None
    sampler.publish(3, [])
    assert engine.calls == [*taken(3), "sleep", *taken(3)]


def test_only_an_engine_with_weights_sleeps(sampler, engine):
    sampler.release()
    assert engine.calls == []
    sampler.publish(0, [])
    sampler.release()
    sampler.release()
    assert engine.calls == [*taken(0), "sleep"]


def test_an_engine_that_fails_to_take_weights_holds_none(sampler, engine):
    def fails():
        raise OSError("disk")
        yield

    sampler.publish(0, [])
    with pytest.raises(OSError, match="disk"):
        sampler.publish(1, fails())
    assert sampler.held is None


def test_all_else_is_the_engines(sampler, engine):
    sampler.publish(7, [])
    done = []
    found = sampler.generate([Request([1], [0, 1]), Request([2], [0])], SAMPLING, lambda *one: done.append(one))
    assert [[one.tokens for one in group] for group in found] == [[[7], [7]], [[7]]] and done == [(0, 0, found[0][0])]
    assert sampler.health() == {"retries": 2.0}
    sampler.abort()
    sampler.close()
    assert engine.calls[3:] == ["generate", "abort", "close"]
