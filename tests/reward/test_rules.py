"""The rules that read an answer, on answers as people write them and on texts of nothing but their marks."""

import time

import pytest

from rft.reward import REWARDS
from tests.helpers import yaml_options
from tests.reward.rules.math_cases import DISAGREEMENTS
from tests.reward.written_answers import MISSED, ROWS

LENGTH = 200_000  # characters
CPU_S = 3.0  # they take less than half a second; some twenty where the time grows with the square of the length


def rule(name, **options):
    node = yaml_options(f"reward/terms/{name}.yaml")[name] | options
    kept = {key: value for key, value in node.items() if key not in ("weight", "call", "reasoning")}
    return REWARDS.build(kept, f"reward.terms.{name}")


@pytest.mark.parametrize(("name", "response", "gold", "score"), ROWS)
def test_answers_as_people_write_them(name, response, gold, score):
    missed = (name, response, gold, score) in MISSED
    assert rule(name)(response, {"answer": gold}) == (0.0 if missed else score)


def test_nearly_all_answers_are_judged_as_by_a_human_and_no_wrong_one_is_accepted():
    known = [("math", response, gold, 1.0) for response, gold, *_ in DISAGREEMENTS]  # right ones that are not read
    given = {row: rule(row[0])(row[1], {"answer": row[2]}) for row in [*ROWS, *known]}
    assert sum(score == row[-1] for row, score in given.items()) / len(given) >= 0.98
    assert [row for row, score in given.items() if score > row[-1]] == []


def test_half_of_the_answers_are_wrong_ones_that_look_right():
    assert len(ROWS) == len({*ROWS}) >= 400
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
