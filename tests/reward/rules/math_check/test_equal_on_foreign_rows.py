"""The rows of math-verify's own tests, read from its source distribution; every other score has its reason here."""

from pathlib import Path

import pytest

from tests.reward.reward_of import score_of
from tests.reward.rules.math_check.foreign_rows import MATH_VERIFY, rows_of_math_verify

COMMA = "a comma separates thousands or the items of a list, not decimals"
MATRICES = "matrices are not added or multiplied"
OPTION = "an option of math-verify that this reward does not have"
BETWEEN = "words stand between the boxes: the last one counts, and a gold answer of this kind is refused"
BROKEN = "the gold answer is no LaTeX"
COUNT = 275
DIFFERENCES = {  # of a row: the score here, None for a gold answer that is refused, and why
    "test_number_extraction 5": (0.0, COMMA),
    "test_number_extraction 6": (0.0, COMMA),
    "test_number_extraction 7": (0.0, COMMA),
    "test_number_extraction 17": (0.0, COMMA),
    "test_latex_notation 5": (1.0, "the last number of a response counts if no formula stands behind it"),
    "test_latex_notation 6": (1.0, "the last number of a response counts if no formula stands behind it"),
    "test_latex_notation_math 2": (None, "a gold answer of more than 1000 characters without a box"),
    "test_relations_math 21": (0.0, BROKEN),
    "test_matrix_extraction 5": (0.0, MATRICES),
    "test_matrix_extraction 6": (0.0, MATRICES),
    "test_complex_math_expressions 4": (None, BROKEN),
    "test_math_extraction_additional_cases 17": (0.0, "the box counts, and it holds another number"),
    "test_set_rel_assymetry 3": (1.0, OPTION),
    "test_boxed 0": (None, BETWEEN),
    "test_numina_cases 3": (0.0, "an inequality of |z| is not solved"),
    "test_numina_cases 24": (None, "the box is not closed"),
    "test_open_thoughts 14": (0.0, BETWEEN),
    "test_open_thoughts 27": (None, BETWEEN),
    "test_open_thoughts 28": (None, BETWEEN),
    "test_strict_variable_comparison 1": (0.0, OPTION),
    "test_string_extraction 9": (0.0, "1 - 1/e is not 1 + 1/e: math-verify is wrong"),
}


def test_the_docs_have_the_figures():
    text = (Path(__file__).parents[4] / "docs/rewards.md").read_text()
    assert (
        f"| {COUNT} rows of math-verify's own tests | {COUNT - len(DIFFERENCES)} as there; {len(DIFFERENCES)} other"
        in text
    )


def scored(gold, pred, precision=6):
    try:
        return score_of("math", pred, {"answer": gold}, float_rounding=precision)
    except ValueError:
        return None


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.skipif(not MATH_VERIFY, reason="RFT_MATH_VERIFY_DIR is not set")
def test_the_rows_of_math_verify():
    rows = rows_of_math_verify()
    assert len(rows) == COUNT
    scores = {name: scored(row["gold"], row["pred"], row.get("precision", 6)) for name, row in rows.items()}
    others = {name for name, row in rows.items() if scores[name] != row.get("expected", row.get("result"))}
    assert {name: scores[name] for name in others} == {name: score for name, (score, _) in DIFFERENCES.items()}
