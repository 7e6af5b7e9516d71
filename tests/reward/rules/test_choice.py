"""Which letter a response chooses, and whether it is the right one."""

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from tests.helpers import yaml_options
from tests.reward.reward_of import reward_of


def rule(
    letters: str = "ABCD",
    markers: tuple[str, ...] = ("answer is", "answer:"),
) -> Plugin:
    options = {"letters": letters, "markers": list(markers)}
    return REWARDS.build({"name": "choice", **options}, "reward.terms.choice")


CHOSEN = {
    "B": "B",
    " B.\n": "B",
    "(B) Paris": "B",
    "B) Paris": "B",
    "**B**": "B",
    "The answer is (C).": "C",
    "ANSWER: **D**, as 4 > 3": "D",
    "Answer:\n\nC": "C",
    "The answer is A. No: the answer is B": "B",
    r"so \boxed{A}, although the answer is B": "A",
    r"$\boxed{\text{C}}$": "C",
    "Answer: A. So the answer is B": "B",  # the first marker that is there counts
}
NONE = ["", "A cat", "b", "I think B", "the answer is a cat", "Answer: E", "The answer is D's", "The answer is Bob"]


@pytest.mark.parametrize(("response", "letter"), CHOSEN.items())
def test_the_letter_that_is_chosen(response, letter):
    assert rule().call("extract", response) == letter
    assert rule()(response, {"answer": letter}) == 1.0
    assert rule()(response, {"answer": f" ({letter.lower()}) "}) == 1.0
    assert rule()(response, {"answer": "ABCD"["ABCD".index(letter) - 1]}) == 0.0


@pytest.mark.parametrize("response", NONE)
def test_no_letter_is_chosen(response):
    assert rule().call("extract", response) is None
    assert all(rule()(response, {"answer": letter}) == 0.0 for letter in "ABCD")


def test_the_letters_and_markers_are_those_of_the_yaml():
    assert rule(letters="wxyz", markers=("I take",)).call("extract", "I take X") == "X"
    assert rule(markers=()).call("extract", "The answer is B") is None


def test_the_reasoning_does_not_count():
    thought = "<think>Is the answer A? The answer is B.</think>"
    node = yaml_options("reward/terms/choice.yaml")["choice"]

    def extract(response, **options):
        return reward_of({"choice": node | options}, "choice").extract([response], [{}])[0]

    assert extract(f"{thought}\n\n(C) Paris") == "C"
    assert extract(thought) is None
    assert extract("<think>The answer is B") is None, "it is not closed"
    assert extract(f"{thought}\n\n(C) Paris", reasoning=[]) == "B"
    with pytest.raises(ValueError, match=r"^reward\.terms\.choice\.reasoning=\['<think>'\]: write the tags before and"):
        extract("", reasoning=["<think>"])


@pytest.mark.parametrize("answer", ["E", "", "AB", 2, "Paris"])
def test_a_row_whose_answer_is_no_letter(answer):
    with pytest.raises(ValueError, match="the field 'answer' is none of the letters ABCD"):
        rule()("B", {"answer": answer})


@pytest.mark.parametrize("letters", ["", "A", "AA", "Aa", "A1", "A B"])
def test_letters_that_are_none(letters):
    with pytest.raises(ValueError, match=r"reward.terms.choice.letters="):
        rule(letters=letters)


def test_a_marker_without_text():
    with pytest.raises(ValueError, match=r"reward.terms.choice.markers: \['answer', ''\] has one without text"):
        rule(markers=("answer", ""))
