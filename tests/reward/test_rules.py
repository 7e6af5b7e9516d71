"""The rules that read an answer, on answers as people write them and on texts of nothing but their marks."""

import time

import pytest

from rft.reward import REWARDS
from tests.helpers import yaml_options
from tests.reward.written_answers import ROWS

LENGTH = 200_000  # characters
CPU_S = 3.0  # they take less than half a second; some twenty where the time grows with the square of the length


def rule(name, **options):
    node = yaml_options(f"reward/terms/{name}.yaml")[name] | options
    kept = {key: value for key, value in node.items() if key not in ("weight", "call", "reasoning")}
    return REWARDS.build(kept, f"reward.terms.{name}")


@pytest.mark.parametrize(("name", "response", "gold", "score"), ROWS)
def test_answers_as_people_write_them(name, response, gold, score):
    assert rule(name)(response, {"answer": gold}) == score


def test_half_of_the_answers_are_wrong_ones_that_look_right():
    assert len(ROWS) == len({*ROWS}) >= 200
    assert 0.45 < sum(score for *_, score in ROWS) / len(ROWS) < 0.55


MARKS = {
    "math": ["\\boxed{", "\\boxed{1} and ", "\\boxed{1}x", "$ ", "$$ ", "\\[ x", "1 000 ", "answer is ", ", because"],
    "choice": ["\\boxed{", "(", "**", "answer is ", "<answer>", "A "],
    "gsm8k": ["#### ", "1,", "1{,}", "$ ", "9."],
    "json": ["```json\n", "```\n", "{"],
}
TEXTS = [(name, mark) for name, marks in MARKS.items() for mark in marks]


@pytest.mark.parametrize(("name", "mark"), TEXTS)
def test_the_time_for_a_text_of_marks_grows_with_its_length(name, mark):
    options = {"extract_from": ["last"]} if name == "math" and "boxed" not in mark and "answer" not in mark else {}
    start = time.process_time()
    rule(name, **options)(mark * (LENGTH // len(mark)) + "!", {"answer": "A" if name == "choice" else "7"})
    assert time.process_time() - start < CPU_S
