"""Objects of environments in processes of their own; what episodes do with them is in test_episodes.py."""

import asyncio
import os
import signal
import time

import pytest

from rft import waits
from rft.registry import Target
from rft.rollout.environment import instance
from rft.rollout.environment.instance import CallFailed, LocalInstance, Processes
from tests.conftest import SOON_S


class Counter:
    """Remembers what it was called with."""

    def __init__(self, start: int) -> None:
        self._count = start

    def reset(self, **row):
        return f"from {self._count} {row}"

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: what is added.
        """
        self._count += number
        return {"count": self._count, "process": os.getpid()}

    async def twice(self) -> str:
        """Waits."""
        await asyncio.sleep(0)
        return 2 * self._count


class Changes:
    """Changes what it gets."""

    def reset(self, prompt, extra_info):
        prompt.append("changed")
        extra_info["seen"] = True
        return None

    def call_tool(self, name, arguments):
        arguments["cities"].append(name)
        return ""


class Slow:
    """Is not prepared before its deadline."""

    @classmethod
    def prepare(cls):
        time.sleep(600)


@pytest.fixture(scope="module")
def processes():
    made = Processes({"counter": {"_target_": f"{__name__}.Counter", "start": 5}})
    yield made
    made.close()


def test_each_environment_has_its_own_process(processes):
    async def use():
        one, two = processes.fork("counter"), processes.fork("counter")
        limits = {"deadline_s": 10.0, "most": 100}
        assert await one.call("reset", row=1, **limits) == "from 5 {'row': 1}"
        await two.call("reset", **limits)
        first, second = await one.call("add", number=2, **limits), await two.call("add", number=9, **limits)
        assert (first["count"], second["count"]) == (7, 14)
        assert len({first["process"], second["process"], os.getpid()}) == 3
        assert await two.call("twice", **limits) == 28
        assert await two.call("reset", **{**limits, "most": 4}) == "from"
        with pytest.raises(CallFailed, match="add raised TypeError") as found:
            await one.call("add", **limits)
        assert found.value.reason == "TypeError" and not one.lost, "an error of a method ends nothing"
        for made in (one, two):
            made.end()
        with pytest.raises(CallFailed, match="has ended"):
            await one.call("add", number=1, **limits)

    asyncio.run(use())


def test_a_class_that_the_server_cannot_import_is_an_error():
    processes = Processes({"counter": {"_target_": "not_there.Counter"}})
    with pytest.raises(ValueError, match=r"^environment\.classes\.counter\._target_: 'not_there\.Counter' cannot"):
        processes.fork("counter")


def test_a_class_that_is_not_prepared_in_time_is_an_error_and_said_before(monkeypatch, caplog):
    monkeypatch.setattr(instance, "START_S", 0.2)
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.02)
    processes = Processes({"slow": {"_target_": f"{__name__}.Slow"}})
    with pytest.raises(OSError, match=r"environment\.classes: .* has not prepared slow within 0\.2 s; prepare data"):
        processes.start()
    assert caplog.messages[0] == (
        "the run waits for the fork server of environments, which prepares the classes slow, 0 s"
    )


def test_a_process_that_takes_no_message_misses_the_deadline_of_the_call(processes):
    async def use():
        made = processes.fork("counter")
        await made.call("reset", deadline_s=SOON_S, most=9)
        found = await made.call("add", number=1, deadline_s=SOON_S, most=9)
        os.kill(found["process"], signal.SIGSTOP)
        with pytest.raises(CallFailed, match=r"^add did not end in 0\.1 s$") as failed:
            await made.call("add", number="x" * 2**22, deadline_s=0.1, most=9)
        with pytest.raises(ProcessLookupError):
            os.kill(found["process"], 0)
        return made, failed.value.reason

    made, reason = asyncio.run(use())
    assert reason == "deadline" and made.lost


def test_an_object_in_this_process_changes_only_copies():
    local = LocalInstance(Target({"_target_": f"{__name__}.Changes"}, "environment.classes.changes"))
    row, arguments = {"prompt": ["a"], "extra_info": {}}, {"cities": ["Rome"]}
    asyncio.run(local.call("reset", deadline_s=None, most=100, **row))
    asyncio.run(local.call("call_tool", "weather", arguments, deadline_s=None, most=100))
    assert row == {"prompt": ["a"], "extra_info": {}} and arguments == {"cities": ["Rome"]}
