"""The answer check of GSM8K, by hand and on the real data."""

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.rules.gsm8k import gold_number

DATA = os.environ.get("RFT_GSM8K_DIR")
needs_data = pytest.mark.skipif(DATA is None, reason="RFT_GSM8K_DIR is not set")


def rule(method: str = "strict", markers: tuple[str, ...] = ("####",)) -> Plugin:
    return REWARDS.build({"name": "gsm8k", "method": method, "markers": list(markers)}, "reward.terms.gsm8k")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "so on\n#### 72"),
        ("#### 72", "72"),
        ("#### 72", 72),
        ("####72", "#### 72"),
        ("clips####   72 clips", "#### 72"),
        ("#### 72.", "#### 72"),
        ("#### 72.0", "#### 72"),
        ("#### 072", "#### 72"),
        ("#### $1,450,000", "#### 1450000"),
        ("#### 1450000", "#### 1,450,000"),
        ("#### -5", "#### -5"),
        ("#### -$5", "#### -5"),
        ("#### $-5", "#### -5"),
        ("#### 0.50", "0.5"),
        ("#### 7\n#### 72", "#### 72"),
        ("#### 50%", "#### 50"),
    ],
)
def test_right(response: str, answer: object) -> None:
    assert rule("strict")(response, {"answer": answer}) == 1.0
    assert rule("flexible")(response, {"answer": answer}) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 73", "#### 72"),
        ("#### 72\n#### 73", "#### 72"),
        ("#### 7 2", "#### 72"),
        ("#### 72.5", "#### 72"),
        ("#### 720", "#### 72"),
        ("#### -72", "#### 72"),
        ("#### 72/2", "#### 72"),
        ("#### 72e3", "#### 72"),
        ("#### 72,5000", "#### 72"),
        ("72 #### none", "#### 71"),
        ("", "#### 72"),
        ("so on\n#### 71", "the gold text 71 is not the gold number\n#### 72"),
    ],
)
def test_wrong(response: str, answer: str) -> None:
    assert rule("strict")(response, {"answer": answer}) == 0.0
    assert rule("flexible")(response, {"answer": answer}) == 0.0


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("so she has 72 clips.", "72"),
        ("10-5", "5"),
        ("(3)-5", "5"),
        ("x=-5", "-5"),
        ("it costs $1,200.50!", "1200.5"),
        ("A: 8\nB: 9", "9"),
    ],
)
def test_flexible_takes_the_last_number_where_there_is_no_marker(response: str, number: str) -> None:
    assert rule("flexible")(response, {"answer": number}) == 1.0
    assert rule("strict")(response, {"answer": number}) == 0.0


def test_flexible_prefers_the_marker() -> None:
    assert rule("flexible")("#### 72 in 3 days", {"answer": "72"}) == 1.0
    assert rule("flexible")("#### 72 in 3 days", {"answer": "3"}) == 0.0


def test_the_last_marker_decides_even_without_a_number() -> None:
    assert rule("strict")("#### 72\n#### ", {"answer": "72"}) == 0.0


def test_markers_are_options() -> None:
    rows = {"answer": "#### 72"}
    assert rule("strict", ("A:",))("so on\nA: 72", rows) == 1.0
    assert rule("strict", ("A:",))("so on\nUSA: 72", rows) == 0.0
    assert rule("strict", ("####",))("so on\nA: 72", rows) == 0.0
    assert rule("strict", ("####", "A:"))("#### 71\nA: 72", rows) == 1.0


def test_a_huge_number_is_no_trouble() -> None:
    assert rule("flexible")("#### " + "9" * 100_000, {"answer": "9"}) == 0.0


@pytest.mark.parametrize("answer", ["no number", "#### none", "1/2", "72 clips"])
def test_a_row_without_a_gold_number_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="'answer' holds no number"):
        rule()("#### 72", {"answer": answer})


@needs_data
@pytest.mark.parametrize(("name", "rows"), [("train", 7473), ("test", 1319)])
def test_real_answers_reach_their_own_number(name: str, rows: int) -> None:
    answers = [json.loads(line)["answer"] for line in (Path(str(DATA)) / f"{name}.jsonl").open(encoding="utf-8")]
    check = rule()
    assert len(answers) == rows
    assert sum(check(answer, {"answer": answer}) for answer in answers) == rows
    for answer in answers:
        plus_one = f"#### {gold_number(answer) + Decimal(1)}"
        assert check(plus_one, {"answer": answer}) == 0.0


@needs_data
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_agrees_with_the_labels_of_real_solutions(method: str) -> None:
    check = rule(method, ("A:",))
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    agree = []
    for line in (Path(str(DATA)) / "model_solutions.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        gold = {"answer": row["ground_truth"].replace("\nA: ", "\n#### ")}
        agree += [(check(row[m]["solution"], gold) == 1.0) == row[m]["is_correct"] for m in models]
    assert len(agree) == 2640
    assert all(agree)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("#### 72", "72"),
        ("#### 072.00", "72"),
        ("#### $1,450,000", "1450000"),
        ("#### -0.0", "0"),
        ("#### -0.50", "-0.5"),
        ("#### 100", "100"),
        ("72", None),
        ("#### none", None),
        (f"#### {'9' * 5000}", "9" * 5000),
    ],
)
def test_what_is_extracted_is_equal_where_the_numbers_are(response: str, found: str | None) -> None:
    assert rule().call("extract", response) == found


def test_what_is_extracted_follows_the_method() -> None:
    assert rule("flexible").call("extract", "so 71, or 72.0") == "72"
