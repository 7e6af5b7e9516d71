"""Worker processes: deadlines, deaths, output, and that nothing is left behind. All of it real."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rft import redaction
from rft.errors import FunctionError
from tests.conftest import SOON_S
from tests.reward.reward_of import reward_of

MODULE = "tests.reward.user_functions"
CALL = {"workers": "process", "concurrency": 2, "deadline_s": 1.0, "failed": "drop_row"}
ROW = {"answer": "a"}


@pytest.fixture
def reward():
    made = reward_of({"a": {"function": f"{MODULE}:by_command", "weight": 1.0, "call": CALL}}, "a")
    yield made
    pool(made).close()


def pool(reward):
    return reward._terms["a"].caller.runner


def children(pid):
    """All descendants of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def test_every_way_to_fail_is_unscored_with_its_reason(reward, capfd):
    texts = ["aa", "raise", "hang", "die", "exit", "lambda", "print", "aaa"]
    found = reward.score(texts, [ROW] * 8)
    assert found.total[[0, 6, 7]].tolist() == [2.0, 5.0, 3.0]
    reasons = ["KeyError", "deadline", "worker_died", "SystemExit", "AttributeError"]
    assert [found.unscored[number].get("a") for number in range(1, 6)] == reasons
    assert found.total[1:6].isnan().all()
    printed = capfd.readouterr()
    assert "a word of the function" not in printed.out, "what a function prints is not the output of the run"


def test_no_output_of_a_worker_has_a_value_that_messages_do_not_show(monkeypatch, capfd):
    monkeypatch.setattr(redaction, "_hidden", {})
    monkeypatch.setenv("RFT_TEST_KEY", "sk-2718281828")
    redaction.hide("sk-2718281828", "${oc.env:RFT_TEST_KEY}")
    made = reward_of({"a": {"function": f"{MODULE}:shows_a_key", "weight": 1.0, "call": CALL}}, "a")
    assert made.score(["x"], [ROW]).total.tolist() == [1.0]
    pool(made).close()
    lines = capfd.readouterr().err.splitlines()
    assert [f"{said} ${{oc.env:RFT_TEST_KEY}}" in lines for said in ("printed", "logged")] == [True, True], lines


@pytest.mark.slow
def test_the_deadline_does_not_count_the_wait_for_a_worker(reward):
    found = reward.score(["hang"] * 4 + ["a"] * 4, [ROW] * 8)
    assert [reasons.get("a") for reasons in found.unscored] == ["deadline"] * 4 + [None] * 4


def test_a_registered_rule_gives_the_same_scores_in_workers():
    rule = {"name": "gsm8k", "weight": 1.0, "method": "flexible", "markers": ["####"]}
    texts = [f"the sum is {number}" for number in range(100)]
    rows = [{"answer": f"#### {number - number % 2}"} for number in range(100)]
    apart = reward_of({"a": rule | {"call": CALL}}, "a")
    scores = apart.score(texts, rows)
    pool(apart).close()
    assert scores.total.tolist() == reward_of({"a": rule}, "a").score(texts, rows).total.tolist()
    assert scores.total.sum() == 50


def test_a_function_by_the_name_of_its_module_scores_in_workers():
    made = reward_of({"a": {"name": f"{MODULE}.by_command", "weight": 1.0, "call": CALL}}, "a")
    scores = made.score(["aa", "aaa"], [ROW] * 2)
    pool(made).close()
    assert scores.total.tolist() == [2.0, 3.0]


def test_the_fork_server_of_rules_needs_neither_torch_nor_transformers():
    code = "import sys, rft.reward.workers; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_function_on_lists_is_one_job():
    batch = reward_of({"a": {"function": f"{MODULE}:trl", "weight": 1.0, "call": CALL}}, "a")
    rows = [{"prompt": "p", "answer": "x"}] * 3
    found = batch.score(["x", "y", ""], rows)
    pool(batch).close()
    assert found.total[:2].tolist() == [1.0, 0.0] and found.unscored[2] == {"a": "none"}


def test_a_dead_fork_server_is_started_again(reward):
    assert reward.score(["a"], [ROW]).total.tolist() == [1.0]
    server = pool(reward)._server._process
    server.kill()
    server.wait()  # the kernel kills the workers with it
    assert reward.score(["aa"], [ROW]).total.tolist() == [2.0], "no call was in it, so none is lost"


def test_a_term_that_cannot_be_built_in_the_fork_server_is_named():
    rule = {"name": "gsm8k", "weight": 1.0, "method": "flexible", "markers": ["####"], "call": {"workers": "process"}}
    reward = reward_of({"a": rule}, "a")
    pool(reward)._server.arguments[1]["name"] = "gone"
    with pytest.raises(FunctionError, match=r"could not build the term \(ValueError: reward\.terms\.a\.name: no"):
        reward.score(["1"], [{"answer": "1"}])


def test_a_model_cannot_be_computed_in_workers():
    node = {"_target_": "rft.reward.models.scalar.RewardModel", "weight": 1.0, "path": "/nowhere", "template": "none"}
    node |= {"template_arguments": {}, "system": None, "tools": None, "micro_batch_tokens": 64, "dtype": "float32"}
    node |= {"normalize": False, "trust_remote_code": False}
    with pytest.raises(ValueError, match=r"^reward\.terms\.a\.call\.workers=process: this term is no function"):
        reward_of({"a": node | {"call": {"workers": "process"}}}, "a")


SCRIPT = f"""
from rft.reward.workers import ForkedPool  # alone: it imports no torch
node = {{"function": "{MODULE}:by_command"}}
pool = ForkedPool("a", node, "reward.terms.a", concurrency=2, deadline_s=100.0)
pool.submit(["a"], [{ROW}]).result()
print("ready", flush=True)
for job in [pool.submit(["hang"], [{ROW}]) for _ in range(2)]:
    job.result()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_is_left_when_the_run_is_killed():
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    deadline = time.monotonic() + SOON_S
    while len(started := children(run.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started) == 3, "the fork server and two workers in an endless loop"
    run.kill()
    run.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.slow
def test_a_hundred_thousand_calls_of_which_some_hang_die_or_fail_invent_no_score():
    words = {1: "die", 2: "hang", 3: "raise", 4: "exit", 5: "lambda"}
    texts = [words.get(number % 1000, "a" * (number % 7)) for number in range(100_000)]
    call = CALL | {"concurrency": 4, "deadline_s": 0.5}
    reward = reward_of({"a": {"function": f"{MODULE}:by_command", "weight": 1.0, "call": call}}, "a")
    found = reward.score(texts, [ROW] * len(texts))
    pool(reward).close()
    broken = {number for number in range(len(texts)) if number % 1000 in words}
    unscored = {number for number, reasons in enumerate(found.unscored) if reasons}
    assert broken <= unscored and len(unscored - broken) < 100, "a busy machine may miss a deadline or two"
    assert {reasons["a"] for reasons in found.unscored if reasons} == {
        "worker_died", "deadline", "KeyError", "SystemExit", "AttributeError"
    }  # fmt: skip
    for number, (text, score) in enumerate(zip(texts, found.total.tolist(), strict=True)):
        assert score == len(text) if number not in unscored else score != score
