"""Rows of other packages for tests of maths answers, read from folders that variables of the environment name."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MATH_VERIFY = os.environ.get("RFT_MATH_VERIFY_DIR", "")  # of the source distribution of math-verify 0.9.0
CHAMP = os.environ.get("RFT_CHAMP_DIR", "")  # with champ-dataset 1.0.0: CHAMP, arXiv 2401.06961
LM_EVAL = os.environ.get("RFT_LM_EVAL_DIR", "")  # with lm_eval 0.4.13, which has some rows of MATH
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


def rows_of_math_verify() -> dict[str, dict[str, Any]]:
    """The rows of its own tests by the name of the test and their number; each has the keys gold and pred."""
    read = subprocess.run([sys.executable, "-c", READ], cwd=MATH_VERIFY, capture_output=True, text=True, check=True)
    return dict(json.loads(read.stdout))


def golds_of_math_verify() -> dict[str, str]:
    """The gold answers of the rows of its tests."""
    return {name: row["gold"] for name, row in rows_of_math_verify().items()}


def golds_of_champ() -> dict[str, str]:
    """The answers of CHAMP by the names of its problems: words and formulas without LaTeX."""
    file = Path(CHAMP, "champ_dataset/dataset_files/v0.json")
    return {name: problem["_answer"] for name, problem in json.loads(file.read_text())["problems"].items()}


def golds_of_math() -> dict[str, str]:
    """The answers of MATH that tasks of lm_eval hold: to rows with faults, and whole solutions that are examples."""
    tasks = Path(LM_EVAL, "lm_eval/tasks")
    rows = json.loads((tasks / "score/math/to_be_fixed_questions.json").read_text())
    code = ast.parse((tasks / "minerva_math/utils.py").read_text())
    texts = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    solutions = [text for text in texts if "\\boxed{" in text and "Final Answer" in text]
    return {row["id"]: row["answer"] for row in rows} | {f"example {n}": text for n, text in enumerate(solutions)}
