"""Calls that begin before all responses are there, in every kind of runner."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from threading import enumerate as enumerate_threads

import pytest

from rft import waits
from rft.errors import FunctionError
from rft.reward.async_runners import LoopRunner, ThreadRunner
from rft.reward.call import Calls
from rft.reward.runners import InlineRunner, call, outcomes
from rft.reward.term import CollectiveError, Failure, RowTerm, Term, leaving_collective
from tests.conftest import SOON_S
from tests.reward import user_functions
from tests.reward.reward_of import reward_of

MODULE = "tests.reward.user_functions"
ROW = {"answer": "a"}


class ChangesWhatItChecks(RowTerm):
    """Changes the rows that it gets."""

    def __init__(self, key):
        pass

    def check_row(self, row):
        row["extra_info"].clear()

    def value(self, response, row):
        return 1.0


class Lengths(RowTerm):
    """Counts letters, in threads."""

    threads = 2

    def __init__(self):
        self.calls = []

    def value(self, response, row):
        self.calls.append(response)
        return float(len(response))


class Pairs(Term):
    """Awaits; scores two responses at a time by the sum of their lengths."""

    rows_per_call = 2
    awaits = True

    async def values(self, responses, rows):
        return [float(sum(map(len, responses)))] * len(responses)


def wait_for(condition):
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize(
    ("function", "workers"),
    [
        ("changes_row", "inline"),
        ("changes_row_async", "inline"),
        ("changes_info", "inline"),
        ("changes_columns", "inline"),
        ("changes_columns", "process"),
    ],
)
def test_a_function_that_changes_its_row_changes_it_for_no_other_call(function, workers):
    row = {"prompt": "p", "answer": "", "extra_info": {"seen": []}}
    node = {"function": f"{MODULE}:{function}", "call": {"workers": workers}}
    reward = reward_of({"a": node | {"weight": 1.0}, "b": node | {"weight": 1.0}}, "a")
    for _ in range(2):  # two steps, with a row that two responses have in common
        assert reward.score(["a", "b"], [row] * 2).total.tolist() == [4.0, 4.0]
    assert row == {"prompt": "p", "answer": "", "extra_info": {"seen": []}}
    reward.close()


def test_a_name_of_a_term_that_metrics_cannot_have_is_refused():
    with pytest.raises(ValueError, match=r"^reward\.terms\.a/b: names of metrics have the name 'a/b'.*rename it$"):
        reward_of({"a/b": {"function": f"{MODULE}:ours", "weight": 1.0}}, "a/b")


def test_a_check_that_changes_its_row_changes_no_row_of_the_run():
    row = {"prompt": "p", "extra_info": {"seen": []}}
    reward_of({"a": {"_target_": f"{__name__}.ChangesWhatItChecks", "weight": 1.0}}, "a").check_row(row)
    assert row == {"prompt": "p", "extra_info": {"seen": []}}


def test_an_awaiting_term_scores_a_response_before_the_others_are_there():
    user_functions.STARTED.clear()
    reward = reward_of({"a": {"function": f"{MODULE}:announces", "weight": 1.0}}, "a")
    with reward.begin() as scoring:
        scoring.add(1, "aa", ROW)
        assert user_functions.STARTED.wait(SOON_S)
        assert scoring.finish(["a", "aa", "aaa"], [ROW] * 3).total.tolist() == [1.0, 2.0, 3.0]
    reward.close()


def test_a_worker_scores_a_response_before_the_others_are_there(tmp_path):
    rows = [{"file": str(tmp_path / str(number))} for number in range(3)]
    node = {"function": f"{MODULE}:leaves_a_file", "weight": 1.0, "call": {"workers": "process"}}
    reward = reward_of({"a": node}, "a")
    with reward.begin() as scoring:
        scoring.add(2, "aaa", rows[2])
        wait_for((tmp_path / "2").exists)
        assert not (tmp_path / "0").exists()
        assert scoring.finish(["a", "aa", "aaa"], rows).total.tolist() == [1.0, 2.0, 3.0]
    reward.close()


def test_a_term_in_threads_scores_a_response_before_the_others_are_there():
    term = Lengths()
    calls = Calls("a", ThreadRunner(term, "a"), 1, 1, False, None)
    calls.add(0, "aa", ROW)
    wait_for(lambda: term.calls == ["aa"])
    calls.add(1, "a", ROW)
    assert calls.finish() == {0: 2.0, 1: 1.0}


def test_a_long_wait_for_a_term_is_said_once_for_all_its_calls(caplog, monkeypatch):
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.02)
    monkeypatch.setattr(waits, "_due", {})
    term = Lengths()
    monkeypatch.setattr(term, "value", lambda *_: wait_for(lambda: caplog.messages) or 1.0)
    calls = Calls("a", ThreadRunner(term, "a"), 1, 1, False, None)
    for number in range(2):
        calls.add(number, "aa", ROW)
    assert calls.finish() == {0: 1.0, 1: 1.0}
    assert caplog.messages[0] == "the run waits for 2 of 2 calls of the reward term 'a', 0 s"


def test_a_term_in_the_main_thread_waits_for_all_responses():
    term = Lengths()
    calls = Calls("a", InlineRunner(term, "a"), 1, 1, False, None)
    calls.add(0, "aa", ROW)
    assert term.calls == [] and calls.finish() == {0: 2.0}


def test_a_call_has_at_most_as_many_responses_as_the_term_takes():
    runner = LoopRunner(Pairs(), "a", 4, None)
    calls = Calls("a", runner, Pairs.rows_per_call, 1, False, None)
    for number, response in enumerate(["a", "aa", "aaa", "aaaa", "a"]):
        calls.add(number, response, ROW)
    assert calls.finish() == {0: 3.0, 1: 3.0, 2: 7.0, 3: 7.0, 4: 1.0}
    runner.close()


def test_calls_that_are_given_up_end_with_their_workers(tmp_path):
    node = {"function": f"{MODULE}:leaves_a_file", "weight": 1.0, "call": {"workers": "process"}}
    reward, row = reward_of({"a": node}, "a"), {"file": str(tmp_path / "file")}

    def fail():
        with reward.begin() as scoring:
            scoring.add(0, "hang", row)
            wait_for((tmp_path / "file").exists)
            raise ConnectionError("the engine is lost")

    with pytest.raises(ConnectionError):
        fail()
    assert reward.score(["aa"], [row]).total.tolist() == [2.0], "the next round starts workers again"
    reward.close()


def test_outcomes_are_one_for_each_response():
    lost = Failure("deadline", "not done")
    assert outcomes([1.0, None], ["a", "b"], "term") == [1.0, None]
    assert outcomes(lost, ["a", "b"], "term") == [lost, lost]
    with pytest.raises(FunctionError, match=r"^the reward term 'term' gave 0 scores for 1 responses"):
        outcomes([], ["a"], "term")


def test_only_failures_that_time_may_cure_are_repeated(monkeypatch):
    monkeypatch.setattr("rft.reward.call.PAUSES_S", (0.0, 0.0))

    class Refused(Lengths):
        threads = 0

        def value(self, response, row):
            self.calls.append(response)
            return Failure("refused", "status 400", repeatable=response == "busy")

    term = Refused()
    calls = Calls("a", InlineRunner(term, "a"), 1, 3, False, None)
    for number, response in enumerate(["busy", "wrong"]):
        calls.add(number, response, ROW)
    assert [one.reason for one in calls.finish().values()] == ["refused", "refused"]
    assert term.calls == ["busy", "wrong", "busy", "busy"]


class Collective(Term):
    """Counts its calls; one with a response leaves a collective by an error."""

    collective = True

    def __init__(self):
        self.calls = 0

    def values(self, responses, rows):
        self.calls += 1
        with leaving_collective():
            return [float("no number") for _ in responses]


def test_a_collective_term_is_called_once_without_responses():
    term = Collective()
    assert Calls("a", InlineRunner(term, "a"), None, 1, True, None).finish() == {} and term.calls == 1


def test_no_error_is_kept_that_leaves_other_ranks_in_a_collective():
    with pytest.raises(FunctionError, match="CollectiveError: ValueError: could not convert") as caught:
        call(Collective(), "a", ["b"], [ROW])
    assert isinstance(caught.value.__cause__, CollectiveError)


class OneAtATime(RowTerm):
    """Counts the calls that run at a time."""

    def __init__(self):
        self.running = self.most = 0

    def value(self, response, row):
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.002)
        self.running -= 1
        return 1.0


def scored_by_threads(runner, count=8):
    """The outcomes of calls that as many threads begin at a time, as in a run that samples ahead of its steps."""
    begin = Barrier(count)

    def score(_):
        calls = Calls("a", runner, 1, 1, False, None)
        begin.wait()
        calls.add(0, "ab", ROW)
        return calls.finish()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(score, range(count)))


def test_one_call_at_a_time_runs_in_the_process_of_the_run():
    term = OneAtATime()
    assert scored_by_threads(InlineRunner(term, "a")) == [{0: 1.0}] * 8
    assert term.most == 1


def test_threads_share_one_event_loop():
    runner = LoopRunner(Pairs(), "of threads", 4, None)
    try:
        assert len(scored_by_threads(runner)) == 8
        assert [thread.name for thread in enumerate_threads()].count("reward of threads") == 1
    finally:
        runner.close()
