"""The reward `math` on the answers and the model solutions of GSM8K."""

import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.registry import Plugin
from rft.reward import REWARDS

DATA = os.environ.get("RFT_GSM8K_DIR")
needs_data = pytest.mark.skipif(DATA is None, reason="RFT_GSM8K_DIR is not set")
DEFAULTS = yaml.safe_load((Path(__file__).parents[3] / "rft/config/reward/terms/math.yaml").read_text())["math"]
RESPONSES = [
    "#### {}",
    r"So it is \boxed{{{}}}.",
    "The answer is {}.",
    r"$\boxed{{\text{{{}}}}}$",
    r"so \(x = {}\)",
    "<think>It is 0.5, no 7.</think>It is {} dollars in all.",
]


def rule() -> Plugin:
    return REWARDS.build(
        {name: value for name, value in DEFAULTS.items() if name not in ("weight", "call", "reasoning")},
        "reward.terms.math",
    )


def answers(*names: str) -> list[str]:
    lines = [line for name in names for line in (Path(DATA or "") / f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line)["answer"] for line in lines]


def writings(answer: str) -> list[str]:
    """The number of an answer of GSM8K, as people and models write it."""
    number = answer.rpartition("####")[2].strip().replace(",", "")
    grouped = f"{int(number):,}" if "." not in number else number
    decimal = number if "." in number else f"{number}.0"
    sign, digits = number[: number.startswith("-")], number.removeprefix("-")
    return [number, grouped, grouped.replace(",", "{,}"), decimal, rf"{sign}\${digits}", f"{number} units"]


def misjudged(answer: str, other: str) -> list[tuple[str, Any]]:
    """The responses to the answer's row, with the answer's number or that of another row, that have a wrong score."""
    math = rule()
    row = {"answer": answer}
    cases = [(text.format(number), 1.0) for number in writings(answer) for text in RESPONSES]
    if writings(other)[3] != writings(answer)[3]:
        cases += [(text.format(number), 0.0) for number in writings(other)[:2] for text in RESPONSES]
    cases += [(answer, 1.0)]
    return [(response, answer) for response, score in cases if math(response, row) != score]


def all_misjudged(pairs: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [wrong for answer, other in pairs for wrong in misjudged(answer, other)]


def pairs(found: list[str]) -> list[tuple[str, str]]:
    return list(zip(found, [*found[1:], *found[:1]], strict=True))


@needs_data
def test_a_sample_of_the_answers_equals_itself_and_no_other() -> None:
    sample = answers("test")[::11]
    assert len(sample) == 120
    assert all_misjudged(pairs(sample)) == []


@pytest.mark.slow
@needs_data
def test_every_answer_equals_itself_and_no_other() -> None:
    found = pairs(answers("train", "test"))
    assert len(found) == 8792
    with get_context("spawn").Pool(2) as pool:
        assert pool.map(all_misjudged, [found[::2], found[1::2]]) == [[], []]


@needs_data
def test_the_solutions_of_models_are_judged_as_the_data_set_says() -> None:
    """Also without the marker "A:" of the data set; the reward gsm8k with this marker judges the same."""
    gsm8k = REWARDS.build({"name": "gsm8k", "method": "strict", "markers": ["A:"]}, "reward.terms.gsm8k")
    math, count, right = rule(), 0, 0
    for line in (Path(DATA or "") / "model_solutions.jsonl").read_text().splitlines():
        question = json.loads(line)
        row = {"answer": question["ground_truth"].rpartition("A:")[2].strip()}
        for name in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            solution, correct = question[name]["solution"], float(question[name]["is_correct"])
            assert math(solution, row) == gsm8k(solution, row) == correct, (row, solution)
            count, right = count + 1, right + int(correct)
    assert (count, right) == (2640, 1008)
