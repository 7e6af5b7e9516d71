"""What the terms of a reward score: those of this project are certified, broken ones are not."""

import json
import os
from pathlib import Path

import pytest

from rft.reward import REWARDS
from rft.reward.certificate.grader import certify, probes
from rft.reward.term import Unscored
from tests.helpers import yaml_options
from tests.reward.reward_of import reward_of

DATA = os.environ.get("RFT_GSM8K_DIR")
NUMBERS = [{"answer": answer} for answer in ("so it is\n#### 1,234", "12", "-2", "3.50", "2")]
FORMULAS = [
    {"answer": gold}
    for gold in ("5", r"\frac{1}{3}", r"2\sqrt{3}", "50\\%", r"\{1,2\}", "[1, 3)", "x = 5", "y = 2x + 3", "Sunday",
                 "1,234", r"so $1+1$ is $\boxed{2}$.", "#### 17", "12 \\text{ cm}", r"(1, 2)", r"\text{(C)}")
]  # fmt: skip
CALLS = [
    [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": {}}],
    [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}],
    [],
]
WORDS = [{"answer": ["Denver Broncos", "the Broncos"]}, {"answer": "York"}, {"answer": "New York"}, {"answer": "北京"}]
LETTERS = [{"answer": letter} for letter in ("A", "b", "(C)")]
PERSON = {"type": "object", "required": ["name"], "examples": [{"name": "Ada"}]}


def term(name, **options):
    return {name: yaml_options(f"reward/terms/{name}.yaml")[name] | options}


def certified(rows, nodes, accuracy):
    for node in nodes.values():
        node["call"] = {"failed": "drop_row"}
    reward, shown = reward_of(nodes, accuracy), []
    texts = probes(reward, rows)
    found = certify(reward, rows, texts, shown.append)
    assert shown[-1] == 2 * len(texts)
    return found


@pytest.mark.parametrize(
    ("rows", "node"),
    [
        ([{"answer": 12}, {"answer": "2"}], term("exact_match")),
        ([{"answer": " 12"}, {"answer": "12"}], term("exact_match", strip=False)),
        (NUMBERS, term("gsm8k")),
        (NUMBERS, term("gsm8k", method="flexible", markers=["A:", "####"])),
        (NUMBERS, term("gsm8k", method="flexible", markers=[])),
        (FORMULAS, term("math")),
        (FORMULAS, term("math", extract_from=["boxed"], reasoning=[])),
        (FORMULAS, term("math", extract_from=["markers", "boxed"])),
        (LETTERS, term("choice")),
        (LETTERS, term("choice", letters="abcd", markers=[])),
        ([{"answer": "yes"}, {"answer": "No"}], term("verdict")),
        (WORDS, term("overlap")),
        (WORDS, term("overlap", metric="exact", tag="answer")),
        (WORDS, term("overlap", metric="contains")),
        ([{}, {}], term("json")),
        ([{}, {}], term("json", fence="required", tag="answer", schema=PERSON)),
        ([{"form": json.dumps(PERSON)}], term("json", schema_field="form")),
        ([{"answer": calls} for calls in CALLS], term("tool_call")),
        ([{"answer": json.dumps(calls)} for calls in CALLS], term("tool_call", format="list", ordered=True)),
        ([{"answer": calls} for calls in CALLS], term("tool_call", score="share")),
    ],
)
def test_the_terms_of_this_project_score_as_they_declare(rows, node):
    (name,) = node
    certificate = certified(rows, node, name)[name]
    assert certificate.faults == []
    assert certificate.rows == len(rows) and certificate.repeated == certificate.texts
    assert certificate.held == certificate.known and certificate.known["gold"] >= len(rows)


def test_counts_by_hand():
    """Two rows have equal answers, and the third another one: it is the other answer of both."""
    rows = [{"answer": "5"}, {"answer": "7"}, {"answer": "5"}]
    certificate = certified(rows, term("exact_match"), "exact_match")["exact_match"]
    # 2 writings and 1 other answer of each row, 1 empty text of each row, and 2 texts whose score is not known
    assert certificate.known == {"gold": 6, "other": 3, "empty": 3} and certificate.texts == 18
    assert certificate.faults == []
    alone = certified([{"answer": "5"}], term("exact_match"), "exact_match")["exact_match"]
    assert alone.known == {"gold": 2, "empty": 1}


def test_terms_without_right_responses_score_every_text_twice_the_same():
    nodes = term("exact_match") | term("format") | term("repetition")
    found = certified([{"answer": "5"}, {"answer": "7"}], nodes, "exact_match")
    for name in ("format", "repetition"):
        assert found[name].known == {} and found[name].faults == []
        assert found[name].repeated == found[name].texts == found["exact_match"].texts == 12


def written(row):
    return [f"It is {row['answer']}"]


@pytest.fixture
def broken(plugins_forgotten):
    """The faults of a function of one's own, (row, found, expected) each."""

    def run(function, **facts):
        REWARDS.register("broken", reads=("answer",), **{"writes": written} | facts)(function)
        found = certified([{"answer": 12}, {"answer": 2}], {"broken": {"name": "broken", "weight": 1.0}}, "broken")
        return [(fault.row, fault.found, fault.expected) for fault in found["broken"].faults]

    return run


def test_a_grader_that_finds_the_answer_inside_another_one(broken):
    assert broken(lambda response, row: float(str(row["answer"]) in response)) == [(1, "1", "0")]
    assert broken(lambda response, row: float(str(row["answer"]) in response), others="any") == []


def test_a_grader_that_rewards_nothing(broken):
    right = {12: "It is 12", 2: "It is 2"}
    assert broken(lambda response, row: float(not response or response == right[row["answer"]])) == [
        (0, "1", "0"), (1, "1", "0")
    ]  # fmt: skip


def test_a_grader_that_refuses_a_right_writing(broken):
    half = broken(lambda response, row: 0.5 * (response == f"It is {row['answer']}"))
    assert half == [(0, "0.5", "1"), (1, "0.5", "1")]
    parts = broken(lambda response, row: float(response == f"It is {row['answer']}") or 0.5, others="less")
    assert parts == [(0, "0.5", "0"), (1, "0.5", "0")], "of the empty text; another answer may have a part"
    assert broken(lambda response, row: 1.0, others="less") == [
        (0, "1", "0"), (1, "1", "0"), (0, "1", "less than 1"), (1, "1", "less than 1")
    ]  # fmt: skip


def test_a_grader_that_depends_on_its_calls(broken):
    calls = []

    def tired(response, row):
        calls.append(response)
        return float(response == f"It is {row['answer']}" and len(calls) <= 10)

    # 10 texts: 2 of no answer for each row, 2 right ones with an empty one each, and 2 of the other row
    assert broken(tired) == [(0, "1, then 0", "the same score twice"), (1, "1, then 0", "the same score twice")]


def test_a_grader_that_fails_is_not_certified(broken):
    def fails(response, row):
        if row["answer"] == 2:
            return Unscored("no judge") if response else 1 / 0
        return float(response == "It is 12")

    found = broken(fails)
    assert {fault[1] for fault in found} == {"no judge", "ZeroDivisionError"} and {fault[0] for fault in found} == {1}
    assert ("a score" in {fault[2] for fault in found}) and len(found) == 5


def test_a_row_is_scored_by_the_terms_of_its_source():
    nodes = term("exact_match") | term("gsm8k")
    for node in nodes.values():
        node["call"] = {"failed": "drop_row"}
    reward = reward_of(nodes, "gsm8k", route={"sums": ["gsm8k"], "other": ["exact_match"]})
    rows = [{"answer": "5", "data_source": "sums"}, {"answer": "7"}, {"answer": "8"}]
    found = certify(reward, rows, probes(reward, rows), lambda done: None)
    assert (found["gsm8k"].rows, found["exact_match"].rows) == (1, 2)
    assert not found["gsm8k"].faults and not found["exact_match"].faults


def test_a_term_in_worker_processes():
    nodes = term("exact_match", call={"workers": "process", "failed": "drop_row"})
    reward = reward_of(nodes, "exact_match")
    rows = [{"answer": "5"}, {"answer": "7"}]
    assert certify(reward, rows, probes(reward, rows), lambda done: None)["exact_match"].faults == []
    reward.close()


@pytest.mark.skipif(DATA is None, reason="RFT_GSM8K_DIR is not set")
@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_the_answers_of_gsm8k(name):
    """The first ones; the pages show the command for all of them."""
    with (Path(DATA or "") / "test.jsonl").open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(200), strict=False)]
    certificate = certified(rows, term(name), name)[name]
    assert certificate.faults == [] and certificate.known["other"] == 200 and certificate.known["gold"] >= 800
