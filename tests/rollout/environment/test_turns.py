import asyncio
import time
from dataclasses import replace

import pytest

from rft import waits
from rft.data.encode.tokenizer import characters
from rft.remote.event_loop import EventLoop
from rft.rollout.environment.turns import TurnQueue
from tests.conftest import SOON_S
from tests.rollout.environment.scripted import ALPHABET, SAMPLING, ScriptedSampler

TOKENIZER = characters(alphabet=ALPHABET)


@pytest.fixture
def loop():
    made = EventLoop("test")
    yield made
    made.close()


def ids(text):
    return TOKENIZER(text).input_ids


def test_requests_that_wait_are_sampled_together(loop):
    sampler = ScriptedSampler(TOKENIZER, str.upper)
    turns = TurnQueue(loop, sampler)

    async def one(number, text):
        with turns.dialogue():
            await asyncio.sleep(0.01 * number)
            return (await turns.sample(ids(text), 3 - number, 9, SAMPLING)).text

    async def dialogues():
        found = await asyncio.gather(*(one(number, text) for number, text in enumerate("abc")))
        return [*found, (await turns.sample(ids("last"), 1, 3, SAMPLING)).text]

    start = time.perf_counter()
    assert turns.serve(dialogues()) == ["A", "B", "C", "LAS"]
    assert sampler.batches == [["c", "b", "a"], ["last"]], "in the order of their seeds, not of their arrival"
    assert time.perf_counter() - start < SOON_S


def test_a_long_wait_for_environments_is_said(loop, caplog, monkeypatch):
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.02)
    monkeypatch.setattr(waits, "_due", {})
    turns = TurnQueue(loop, ScriptedSampler(TOKENIZER, str.upper))

    async def one():
        with turns.dialogue():
            async with asyncio.timeout(SOON_S):
                while not caplog.messages:
                    await asyncio.sleep(0.01)

    turns.serve(one())
    assert caplog.messages[0] == "the engine waits for the environments and tools of 1 dialogues, 0 s"


def test_each_way_of_sampling_is_a_batch_of_its_own(loop):
    sampler = ScriptedSampler(TOKENIZER, str.upper)
    turns, other = TurnQueue(loop, sampler), replace(SAMPLING, temperature=0.5)

    async def dialogues():
        ways = [SAMPLING, other, SAMPLING]
        return [c.text for c in await asyncio.gather(*(turns.sample(ids("ab"), 1, 9, way) for way in ways))]

    assert turns.serve(dialogues()) == ["AB"] * 3 and sorted(map(len, sampler.batches)) == [1, 2]


def test_a_dialogue_that_waits_delays_no_other(loop):
    turns, ended = TurnQueue(loop, ScriptedSampler(TOKENIZER, str.upper)), []

    async def one(name, seconds):
        await turns.sample(ids(name), 1, 9, SAMPLING)
        await asyncio.sleep(seconds)
        await turns.sample(ids(name), 1, 9, SAMPLING)
        ended.append(name)

    async def dialogues():
        await asyncio.gather(one("slow", 0.3), one("quick", 0.0))

    start = time.perf_counter()
    turns.serve(dialogues())
    assert ended == ["quick", "slow"] and time.perf_counter() - start < SOON_S


def test_errors_of_engine_and_dialogues_are_raised(loop):
    async def fails():
        raise ValueError("of a dialogue")

    with pytest.raises(ValueError, match="of a dialogue"):
        TurnQueue(loop, ScriptedSampler(TOKENIZER, str.upper)).serve(fails())

    def lost(text):
        raise OSError("of the engine")

    turns = TurnQueue(loop, ScriptedSampler(TOKENIZER, lost))

    async def asks():
        return await turns.sample(ids("a"), 1, 9, SAMPLING)

    with pytest.raises(OSError, match="of the engine"):
        turns.serve(asks())
