"""Episodes between a scripted policy and real environments."""

import json
import threading
import time

import pytest

from rft.batch.row_fields import EPISODE_FIELD
from rft.batch.trajectory import to_rows
from tests.conftest import SOON_S
from tests.rollout.environment.play import environments
from tests.rollout.environment.scripted import play

HERE = environments.__name__
SHOP = {"shop": {"_target_": f"{HERE}.Shop", "currency": "GBP"}}
FAULTY = {"faulty": {"_target_": f"{HERE}.Faulty"}}
GUESS = {"guess": {"_target_": f"{HERE}.Guess"}}
EOS = "<eos>"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def texts(trajectory, tokenizer):
    return [(segment.sampled, tokenizer.decode(segment.tokens)) for segment in trajectory.segments]


def test_a_dialogue_with_tools_by_hand():
    answers = ["hm " + call("price", item="tea", count=2) + call("stock"), "6"]
    [[found]], sampler = play(lambda text: answers[text.count(EOS)], SHOP, [{"prompt": "Q"}])
    assert texts(found, sampler.tokenizer) == [
        (False, "[price stock] Q"), (True, answers[0] + EOS), (False, '6 GBP={"tea": 3}='), (True, "6" + EOS)
    ]  # fmt: skip
    assert [segment.trains for segment in found.segments] == [False, True, False, True]
    assert found.text == "6" and found.finish.reason == "stop" and found.turns == 2
    record = found.episode
    assert {name: record[name] for name in ("turns", "tool_calls", "tool_failures", "forks", "reward", "failed")} == {
        "turns": 2, "tool_calls": 2, "tool_failures": 0, "forks": [], "reward": 1.0, "failed": None
    }  # fmt: skip
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert record["messages"][1]["content"] == "hm" and len(record["messages"][1]["tool_calls"]) == 2
    [row] = to_rows(found, group=1, unit=5)
    assert row["turn"].tolist() == [0] * 15 + [1] * (len(answers[0]) + 1) + [0] * 17 + [2, 2]
    assert row["response_mask"].tolist() == [turn > 0 for turn in row["turn"].tolist()]


def test_what_reset_returns_is_behind_the_prompt():
    [[found]], sampler = play(lambda text: "ok", SHOP, [{"prompt": "Q", "budget": 9}])
    assert texts(found, sampler.tokenizer)[0] == (False, "[price stock] Q (budget 9)")
    [[found]], _ = play(lambda text: "5", GUESS, [{"prompt": [{"role": "user", "content": "Q"}], "number": 5}])
    assert texts(found, sampler.tokenizer)[0] == (False, "Q guess:")


def test_steps_in_the_place_of_tools():
    tries = iter(["3", "8", "5"])
    [[found]], sampler = play(lambda text: next(tries), GUESS, [{"prompt": "Q", "number": 5}])
    assert [text for _, text in texts(found, sampler.tokenizer)] == [
        "Q guess:",
        f"3{EOS}",
        "low",
        f"8{EOS}",
        "high",
        f"5{EOS}",
    ]
    assert found.episode["reward"] == 1.0 and found.episode["turns"] == 3 and found.finish.reason == "stop"
    [[cut]], _ = play(lambda text: "stop", GUESS, [{"prompt": "Q", "number": 5}])
    assert cut.finish.reason == "length" and cut.episode["reward"] == -1.0, "truncated by the environment"


def test_limits_of_turns_and_tokens_truncate():
    forever = lambda text: call("stock")  # noqa: E731
    [[found]], _ = play(forever, SHOP, [{"prompt": "Q"}], max_turns=3)
    assert found.turns == 3 and found.finish.reason == "length" and found.episode["tool_calls"] == 3
    [[found]], _ = play(forever, SHOP, [{"prompt": "Q"}], max_tokens=150)
    behind = sum(len(segment.tokens) for segment in found.segments[1:])
    assert behind <= 150 and found.finish.reason == "length" and found.segments[-1].sampled
    [[found]], _ = play(forever, SHOP, [{"prompt": "Q"}], context=40)
    assert sum(len(segment.tokens) for segment in found.segments) == 40, "the context of the model is a limit, too"


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_a_tool_that_fails_is_an_error_that_the_model_reads(workers):
    script = [
        call("raises"), call("bytes"), call("leaves"), call("nothing"), call("bytes", x=1), "<tool_call>{</tool_call>",
        "<tool_call>", "end",
    ]  # fmt: skip
    [[found]], _ = play(lambda text: script[text.count(EOS)], FAULTY, [{"prompt": "Q"}], max_turns=9, workers=workers)
    outputs = [message["content"] for message in found.episode["messages"] if message["role"] == "tool"]
    assert outputs == [
        "error: raises raised ZeroDivisionError: by zero",
        "�� ok",
        "error: leaves raised SystemExit: 3",
        "error: there is no tool 'nothing' (there are: bytes, dies, hangs, leaves, prints, raises)",
        "error: it takes no argument x (it takes: none)",
        outputs[5],
        "error: a <tool_call> is not closed",
    ]
    assert outputs[5].startswith("error: the call is no JSON")
    assert found.episode["tool_calls"] == 7 and found.episode["tool_failures"] == 6
    assert found.episode["failed"] is None and found.episode["reward"] == 1.0


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_halves_of_characters_are_replaced(workers):
    script = [call("tells") + call("raises"), "end"]
    halves = {"halves": {"_target_": f"{HERE}.Halves"}}
    [[found]], _ = play(lambda text: script[text.count(EOS)], halves, [{"prompt": "Q"}], workers=workers)
    contents = [message["content"] for message in found.episode["messages"]]
    assert contents == ["Q�", "", '["a�", {"�": 1}]', "error: raises raised ValueError: �", "end"]
    assert found.episode["failed"] is None


@pytest.mark.slow
def test_a_tool_that_hangs_or_prints_much(capfd):
    rows = [{"prompt": "hangs"}, {"prompt": "prints"}]
    answer = lambda text: "end" if EOS in text else call(text.split()[-1])  # noqa: E731
    start = time.perf_counter()
    found, _ = play(answer, FAULTY, rows, tool_deadline_s=2.5, tool_max_tokens=40)
    assert time.perf_counter() - start < SOON_S, "a hanging tool delays nothing"
    hung, printed = (group[0].episode for group in found)
    assert hung["messages"][2]["content"] == "error: hangs did not end in 2.5 s" and hung["failed"] is None
    assert printed["messages"][2]["content"] == "y" * 40
    capfd.readouterr()
    [[hung], [printed], [died]], _ = play(
        answer, FAULTY, [*rows, {"prompt": "dies"}], tool_deadline_s=2.5, tool_max_tokens=40, workers="process"
    )
    assert hung.episode["failed"] == "deadline: hangs did not end in 2.5 s"
    assert died.episode["failed"] == "process_died: dies: the process of the environment has died"
    assert printed.episode["failed"] is None and printed.episode["messages"][2]["content"] == "y" * 40
    assert "xxx" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("classes", "row", "reason"),
    [
        (FAULTY, {"fails": "reset"}, "OSError: reset raised OSError: no such place"),
        (FAULTY, {"fails": "type"}, "reset: it returned 7, neither text, chat messages nor None"),
        (FAULTY, {"fails": "reward"}, "get_reward: the reward is nan, not a finite number"),
        (FAULTY, {"fails": "text"}, "get_reward: the reward is '1', not a finite number"),
        (GUESS, {"number": 1}, "step: step returned 'no tuple'; it must return (observation, reward, terminated,"),
        (GUESS, {"number": 13}, "AssertionError: close raised AssertionError: unlucky"),
    ],
)
def test_an_environment_that_fails_ends_its_own_episode(classes, row, reason):
    good = {"prompt": "Q", "number": 5}
    [[failed], [other]], _ = play(
        lambda text: "bad" if row.get("number") == 1 else "13", classes, [{"prompt": "Q", **row}, good]
    )
    assert failed.episode["failed"].startswith(reason)
    assert to_rows(failed, group=0, unit=0)[0]["fields"][EPISODE_FIELD]["failed"] == failed.episode["failed"]
    if row.get("number") != 1:
        assert other.episode["failed"] is None


def test_an_episode_has_a_limit_of_seconds():
    [[found]], _ = play(lambda text: call("hangs"), FAULTY, [{"prompt": "Q"}], max_seconds=0.5, tool_deadline_s=None)
    assert found.episode["failed"] == "seconds: the episode took longer than 0.5 s"


def test_rows_choose_their_environment():
    rows = [{"prompt": "Q", "environment": "shop"}, {"prompt": "Q", "environment": "guess", "number": 4}]
    [[shop], [guess]], _ = play(lambda text: "4", SHOP | GUESS, rows, samples=1)
    assert shop.turns == 1 == guess.turns and guess.episode["reward"] == 1.0 and shop.episode["reward"] == 0.0
    for row, message in (
        ({"prompt": "Q"}, "no field 'environment'"),
        ({"prompt": "Q", "environment": "shp"}, "mean shop"),
    ):
        with pytest.raises(ValueError, match=message):
            play(lambda text: "4", SHOP | GUESS, [row])


def test_an_error_of_the_engine_ends_the_episodes():
    def fail(text):
        raise OSError("the engine is lost")

    with pytest.raises(OSError, match="the engine is lost"):
        play(fail, SHOP, [{"prompt": "Q"}], samples=4)


def test_a_tool_that_sleeps_delays_no_other_dialogue():
    class_ = {"slow": {"_target_": f"{__name__}.Slow"}}
    Slow.most = 0
    found, _ = play(
        lambda text: "end" if text.count(EOS) == 3 else call("sleep"),
        class_, [{"prompt": str(n % 10)} for n in range(64)], concurrency=64,
    )  # fmt: skip
    slowest = max(group[0].episode["environment_s"] for group in found)
    assert all(group[0].turns == 4 for group in found)
    assert Slow.most > 1, "tools of several dialogues sleep at the same time"
    assert slowest >= 3 * 0.05 * 0.9


class Slow:
    """A tool that takes as long as the row says; `most` counts those that have slept at the same time."""

    asleep, most, lock = 0, 0, threading.Lock()

    def reset(self, prompt, **row):
        self._seconds = 0.005 * (1 + int(prompt))

    def sleep(self) -> str:
        """Sleeps."""
        with self.lock:
            Slow.asleep += 1
            Slow.most = max(Slow.most, Slow.asleep)
        time.sleep(self._seconds)
        with self.lock:
            Slow.asleep -= 1
        return ""
