"""The rows of math-verify's own tests, read from its source distribution; every other score has its reason here."""

import json
import os
import subprocess
import sys

import pytest

from tests.reward.reward_of import score_of

FOLDER = os.environ.get("RFT_MATH_VERIFY_DIR", "")  # of the source distribution of math-verify 0.9.0
READ = """
import importlib, json, pathlib, sys
sys.path.insert(0, "")
rows = []
for path in sorted(pathlib.Path("tests").glob("test_*.py")):
    for name, function in vars(importlib.import_module(f"tests.{path.stem}")).items():
        if getattr(function, "__module__", "") != f"tests.{path.stem}":
            continue
        for mark in getattr(function, "pytestmark", []):
            names = [one.strip() for one in mark.args[0].split(",")]
            if names[:2] == ["gold", "pred"]:
                found = [dict(zip(names, row)) for row in mark.args[1]]
                rows += [(f"{name} {number}", row) for number, row in enumerate(found)]
print(json.dumps(rows))
"""
COMMA = "a comma separates thousands or the items of a list, not decimals"
MATRICES = "matrices are not added or multiplied"
OPTION = "an option of math-verify that this reward does not have"
BETWEEN = "words stand between the boxes: the last one counts, and a gold answer of this kind is refused"
BROKEN = "the gold answer is no LaTeX"
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


def scored(gold, pred, precision=6):
    try:
        return score_of("math", pred, {"answer": gold}, float_rounding=precision)
    except ValueError:
        return None


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.skipif(not FOLDER, reason="RFT_MATH_VERIFY_DIR is not set")
def test_the_rows_of_math_verify():
    read = subprocess.run([sys.executable, "-c", READ], cwd=FOLDER, capture_output=True, text=True, check=True)
    rows = json.loads(read.stdout)
    assert len(rows) == len(dict(rows)) == 275
    scores = {name: scored(row["gold"], row["pred"], row.get("precision", 6)) for name, row in rows}
    others = {name for name, row in rows if scores[name] != row.get("expected", row.get("result"))}
    assert {name: scores[name] for name in others} == {name: score for name, (score, _) in DIFFERENCES.items()}
