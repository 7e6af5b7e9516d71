"""Gold answers of maths sets: each equals itself and not the next one. What is refused or equal is listed here."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from rft.reward.rules.math_check.answer import BOX
from tests.reward.reward_of import score_of
from tests.reward.rules.math_check.foreign_rows import (
    CHAMP,
    LM_EVAL,
    MATH_VERIFY,
    golds_of_champ,
    golds_of_math,
    golds_of_math_verify,
)


class Golds(NamedTuple):
    """Gold answers of one set.

    Attributes:
        count: of different golds.
        refused: the names of those that are refused, by the reason.
        equal: the names of those that truly equal the next one.
    """

    folder: str
    read: Callable[[], dict[str, str]]
    count: int
    refused: dict[str, list[str]]
    equal: list[str]


EXPLAINED = [  # "100 (i.e., all values)"
    *(f"P_Inequality_{number}" for number in (14, 35)),
    *(f"P_Polynomial_{number}" for number in (3, 8, 16, 27, 28, 42)),
    *(f"P_Sequence_{number}" for number in (6, 9, 22, 27, 35)),
]
SETS = {
    "math_verify": Golds(
        MATH_VERIFY,
        golds_of_math_verify,
        208,
        {
            "a solution of more than 1000 characters without a box": ["test_latex_notation_math 2"],
            "no LaTeX": ["test_complex_math_expressions 4", "test_numina_cases 24"],
            "other words between boxes": ["test_boxed 0", "test_open_thoughts 27", "test_open_thoughts 28"],
        },
        [  # numbers with and without decimals and as percent, x = 1 and 1, an interval and inequalities
            "test_number_extraction 2",
            "test_percent_notation 0",
            "test_percent_notation 10",
            "test_percent_notation 13",
            "test_relations_math 24",
            "test_set_rel_assymetry 0",
        ],
    ),
    "champ": Golds(
        CHAMP,
        golds_of_champ,
        162,
        {
            "words in brackets behind a value": EXPLAINED,
            "sums without LaTeX": ["P_Combinatorics_33", "P_Combinatorics_37", "P_Inequality_12"],
            "floor without LaTeX": ["P_Combinatorics_3"],
            "a product or list with dots": ["P_Polynomial_46", "P_Sequence_43"],
        },
        [],
    ),
    "math": Golds(LM_EVAL, golds_of_math, 14, {}, []),
}


def test_the_docs_have_the_figures() -> None:
    text = (Path(__file__).parents[4] / "docs/rewards.md").read_text()
    refused = sum(len(names) for golds in SETS.values() for names in golds.refused.values())
    assert f"| {sum(golds.count for golds in SETS.values())} gold answers of these rows" in text
    assert f"not the next; {refused} are refused |" in text


def score(gold: str, answer: str) -> float | None:
    """Of an answer in a box, if it has none; None where the gold is refused."""
    try:
        return score_of("math", answer if BOX.search(answer) else rf"\boxed{{{answer}}}", {"answer": gold})
    except ValueError:
        return None


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.parametrize("name", SETS)
def test_golds_equal_themselves_and_not_the_next(name: str) -> None:
    golds = SETS[name]
    if not golds.folder:
        pytest.skip("the variable of the environment with the folder is not set")
    names = {gold: name for name, gold in reversed(golds.read().items())}
    scores = {gold: score(gold, gold) for gold in reversed(names)}
    read = [gold for gold, own in scores.items() if own is not None]
    assert len(scores) == golds.count
    assert {names[gold] for gold in scores if gold not in read} == {*chain(*golds.refused.values())}
    assert [names[gold] for gold in read if scores[gold] != 1.0] == []
    pairs = zip(read, [*read[1:], *read[:1]], strict=True)
    assert [names[gold] for gold, other in pairs if score(gold, other) != 0.0] == golds.equal
