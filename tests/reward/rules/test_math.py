"""Which final answers are equal, by mathematics; what is refused, and what is left unscored."""

import builtins
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.term import Unscored
from tests.reward.reward_of import score_of
from tests.reward.rules.math_cases import CASES, DISAGREEMENTS, THOUGHTS

ROOT = Path(__file__).parents[3]
DEFAULTS = yaml.safe_load((ROOT / "rft/config/reward/terms/math.yaml").read_text())["math"]


def rule(**options: Any) -> Plugin:
    node = {name: value for name, value in DEFAULTS.items() if name not in ("weight", "call", "reasoning")} | options
    return REWARDS.build(node, "reward.terms.math")


def score(response: str, answer: object, **options: Any) -> Any:
    return rule(**options)(response, {"answer": answer})


@pytest.mark.parametrize(("response", "gold", "expected"), CASES)
def test_answers_are_equal_as_mathematics_says(response: str, gold: str, expected: float) -> None:
    assert score(response, gold) == expected


@pytest.mark.parametrize(("response", "gold", "given", "why"), DISAGREEMENTS)
def test_what_is_known_to_be_judged_otherwise(response: str, gold: str, given: float, why: str) -> None:
    assert score(response, gold) == given, why


def test_the_table_is_large_and_has_no_case_twice() -> None:
    assert len(CASES) == len({case[:2] for case in CASES}) > 500
    assert 0.4 < sum(case[2] for case in CASES) / len(CASES) < 0.6


GOLD = [
    "5",
    "1/3",
    r"2\sqrt{3}",
    "50\\%",
    r"\{1,2\}",
    "[1, 3)",
    "x = 5",
    "y = 2x + 3",
    r"\text{(C)}",
    "Sunday",
    "1,234",
]


@pytest.mark.parametrize("gold", GOLD)
def test_a_gold_answer_equals_itself_however_the_field_is_written(gold: str) -> None:
    for answer in (gold, f"so it is\n#### {gold}", rf"so $1+1$ is $\boxed{{{gold}}}$."):
        assert score(rf"\boxed{{{gold}}}", answer) == 1.0
        assert score(rf"\boxed{{{gold}}}, no: \boxed{{77}}", answer) == 0.0


@pytest.mark.parametrize("answer", ["5\\ ", "5 \\\\", "95\\%\\ ", "\\{1,2\\}\\", "#### 5\\ "])
def test_a_gold_answer_that_ends_with_a_backslash_is_written_so_that_it_is_right(answer: str) -> None:
    math = rule()
    written = math.call("writes", {"answer": answer})
    assert written and [math(response, {"answer": answer}) for response in written] == [1.0] * len(written)


@pytest.mark.parametrize("answer", [5, 5.0, "5", "#### 5"])
def test_an_answer_may_be_a_number(answer: object) -> None:
    assert score("#### 5", answer) == 1.0
    assert score("#### 6", answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "   ",
        r"\boxed{}",
        "####",
        "(1,2",
        "x(5",
        "even)",
        r"\frac{1}{",
        "x +",
        "1/0",
        "9^{9^{9^9}}",
        "9" * 1001,
        "(-1)!",
        "2^{(-1)!}",
        r"\int x dx",
    ],
)
def test_a_gold_answer_that_cannot_be_read_is_refused(answer: str) -> None:
    for ask in (lambda: rule().call("gold", {"answer": answer}), lambda: score("5", answer)):
        with pytest.raises(
            ValueError, match=r"the field 'answer' cannot be parsed, as .*: .*; write .*or remove the row"
        ):
            ask()


def test_a_gold_answer_with_boxes_apart_is_refused_and_one_that_repeats_its_box_is_not() -> None:
    message = r"^the field 'answer' holds more than one \\boxed\{\}: '1' and '2'; leave the final answer in a box, join"
    with pytest.raises(ValueError, match=message):
        rule().call("gold", {"answer": r"First \boxed{1} papers, and then \boxed{2} bins."})
    assert score("5", r"So \boxed{5}. The answer is \boxed{ 5 }.") == 1.0


@pytest.mark.parametrize("answer", [None, [5], {"a": 5}, True, float("nan")])
def test_a_gold_answer_of_another_type_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match=r"the field 'answer' is .*, which is no answer; write a text or a number"):
        rule().call("gold", {"answer": answer})


ABSURD = [
    "9^{9^{9^9}}",
    r"\frac{9^{9^9}}{9^{9^8}}",
    "1000000!",
    "9!!!!",
    "((9!)!)!",
    "10^{100000}",
    "1e999999999",
    r"1.5 \times 10^{999999999}",
    "((x+1)^{100}+1)^{100}",
    r"\cosh(10^{1000})",
    r"e^{e^{e^{100}}}",
    r"\sum_{k=1}^{10^9} \frac{1}{k}",
    r"\prod_{k=1}^{\infty} k",
    "9" * 100_000,
    "(" * 400 + "6" + ")" * 400,
]


@pytest.mark.parametrize("expression", ABSURD)
def test_an_absurd_answer_is_wrong_and_not_evaluated(expression: str) -> None:
    for gold in ("5", "x+1", r"\sqrt{2}"):
        assert score(rf"\boxed{{{expression}}}", gold) == 0.0
    assert rule().call("extract", rf"\boxed{{{expression}}}") in (None, "6")


def test_what_math_verify_reads_as_a_set_has_a_text():
    assert rule().call("extract", "Answer:${x}") == "{x}"


@pytest.mark.parametrize(
    "response", ["9" * 1_000_000, "$" * 20_000, "\\[" * 20_000, "answer is " * 20_000, r"\boxed{" * 9_000]
)
def test_a_response_of_any_length_is_judged(response: str) -> None:
    assert score(response, "5") == 0.0


@pytest.mark.parametrize(
    "expression", ["(-1)!", r"\sum_{k=1}^{\infty} k", r"\frac{d}{dx} f(x)", r"\int_0^1 x dx", "x < i", "1/0"]
)
def test_a_response_gains_nothing_by_an_answer_without_a_value(expression: str) -> None:
    for gold in ("5", "x", "(1,2] \\cup [5,6)"):
        assert score(rf"\boxed{{{expression}}}", gold) == 0.0


def test_a_comparison_that_fails_is_unscored() -> None:
    assert score("5", r"\sum_{k=1}^{\infty} k x") == Unscored("math-verify failed on the answers: ValueError")


def test_answers_are_compared_outside_of_the_main_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(score(r"\boxed{f(x)+1}", "1+f(x)")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_where_the_answer_is_looked_for() -> None:
    response = "so x = 1\n#### 2\n\\boxed{3}"
    for places, answer in ((["boxed"], "3"), (["markers", "boxed"], "2"), (["last"], "3"), (["boxed", "markers"], "3")):
        assert rule(extract_from=places).call("extract", response) == answer
    assert score("#### 5", "5", extract_from=["boxed"]) == 0.0
    assert score("it is 5", "5", extract_from=["boxed", "markers"]) == 0.0
    assert score("FINAL: 5", "5", extract_from=["markers"], markers=["final:"]) == 1.0
    assert score("#### 5", "5", extract_from=["markers"], markers=["final:"]) == 0.0


def test_the_first_marker_that_is_there_counts() -> None:
    response = "The answer is 2. So #### 1. So the answer is 3"
    assert score(response, "1") == 1.0
    assert score(response, "3", markers=["answer is", "####"]) == 1.0


def test_the_tags_of_the_reasoning() -> None:
    response = r"<a>\boxed{4}</a>It is 5"
    assert score_of("math", response, {"answer": "4"}) == 1.0
    assert score_of("math", response, {"answer": "5"}, reasoning=["<a>", "</a>"]) == 1.0
    assert score_of("math", r"<think>\boxed{4}", {"answer": "4"}, reasoning=[]) == 1.0


@pytest.mark.parametrize(("response", "gold", "expected"), THOUGHTS)
def test_an_answer_in_a_thought_does_not_count(response: str, gold: str, expected: float) -> None:
    assert score_of("math", response, {"answer": gold}) == expected


def test_float_rounding() -> None:
    assert [score("0.33", "1/3", float_rounding=places) for places in (1, 2, 3)] == [1.0, 1.0, 0.0]
    assert [score("0.0033", "1/300", float_rounding=places) for places in (2, 3)] == [1.0, 0.0]
    assert [score("3", "3.2", float_rounding=places) for places in (0, 1)] == [1.0, 0.0]
    assert score("3", "4", float_rounding=0) == 0.0


def test_percent_as_unit() -> None:
    for as_unit, scores in ((True, [1.0, 1.0, 1.0]), (False, [1.0, 0.0, 0.0])):
        pairs = (("50%", "0.5"), ("50%", "50"), ("50", "50%"))
        assert [score(response, gold, percent_as_unit=as_unit) for response, gold in pairs] == scores
    assert [rule(percent_as_unit=unit).call("extract", "50%") for unit in (True, False)] == ["50", "1/2"]


EQUAL = [
    ["5", "5.0", r"\boxed{x = 5}", "#### 5", r"\boxed{\frac{10}{2}}", r"\boxed{\sqrt{25}}", r"\boxed{5\text{ cm}}"],
    ["1/2", "0.5", r"\boxed{\frac12}", r"\boxed{\frac{1}{\sqrt{4}}}"],
    [r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", r"\boxed{\frac{6}{\sqrt3}}"],
    [r"\boxed{1, 2}", r"\boxed{\{2, 1\}}", r"\boxed{x=1 \text{ or } x=2}"],
    [r"\boxed{x^2+2x+1}", r"\boxed{(x+1)^2}", r"\boxed{x(x+2)+1}"],
    [r"\boxed{\text{Sunday}}", "The answer is Sunday."],
    [r"\boxed{[1,3)}", r"\boxed{1 \le x < 3}"],
    [r"\boxed{(-\infty,0)\cup(1,2)}", r"\boxed{(1,2)\cup(-\infty,0)}"],
    [r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\boxed{\begin{bmatrix}1.0&2\\3&4\end{bmatrix}}"],
]  # fmt: skip


def test_equal_answers_have_equal_texts_and_others_have_others() -> None:
    texts = [{rule().call("extract", response) for response in responses} for responses in EQUAL]
    assert [len(found) for found in texts] == [1] * len(EQUAL)
    assert len(set.union(*texts)) == len(EQUAL)
    assert None not in set.union(*texts)
    assert [rule().call("extract", response) for response in ("", "I do not know.", r"\boxed{}", r"\boxed{x+}")] == [
        None
    ] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extract_from": []}, "extract_from=.*: name each place once"),
        ({"extract_from": ["last", "last"]}, "extract_from=.*: name each place once"),
        ({"extract_from": ["end"]}, r"extract_from\[0\]: expected one of boxed, markers, last"),
        ({"markers": []}, r"markers: \[\] gives no text to look for"),
        ({"markers": ["a", ""]}, r"markers: \['a', ''\] gives no text to look for"),
        ({"float_rounding": -1}, "float_rounding=-1: it must be at least 0"),
        ({"float_rounding": 16}, "float_rounding=16: it must be at most 15"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.terms\.math\.{message}"):
        rule(**options)
    assert score(r"\boxed{5}", "5", extract_from=["boxed"], markers=[]) == 1.0


def test_the_message_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **named: Any) -> Any:
        if name == "math_verify":
            raise ImportError(name)
        return imported(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r'reward\.terms\.math\.name=math needs .*: pip install "rft\[math\]"'):
        rule()
