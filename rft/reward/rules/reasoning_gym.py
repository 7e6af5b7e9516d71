"""The score that a task of reasoning-gym gives to the answer of a response."""

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from rft.data.rows.packages import REASONING_GYM
from rft.reward.rules.tags import bad_tag, last_block
from rft.reward.term import RowTerm

# Tasks whose checker runs the answer as Python code: by `eval`, or by sympy's `parse_expr`, which calls it.
RUNNING = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


class ReasoningGymScore(RowTerm):
    """`score_answer` of the task of a row: 1 for a right answer, and for another one 0 or a part, as the task decides.

    Args:
        key: supplied; the term's place in the yaml.
        tag: the answer is the text of the last block of this tag, and a response without one has 0; null: the whole
            response.
        run_answers: accepts rows of the tasks in `RUNNING`.

    Raises:
        ValueError: the package is not installed, or the tag is none.
    """

    reads = (REASONING_GYM,)
    extracts = True
    thoughts = "skip"

    def __init__(self, key: str, tag: str | None, run_answers: bool) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(f'{key} needs the package reasoning-gym: pip install "rft[reasoning_gym]"')
        if (fault := bad_tag("tag", tag)) is not None:
            raise ValueError(f"{key}.{fault}")
        self._key = key
        self._tag = tag
        self._run_answers = run_answers

    def check_row(self, row: Mapping[str, Any]) -> None:
        entry = row[REASONING_GYM]
        if not isinstance(entry, dict) or not {"task", "options", "answer", "metadata"} <= entry.keys():
            raise ValueError(
                f"the field {REASONING_GYM!r} is not one that rows of data=reasoning_gym have: {entry!r:.80}"
            )
        if entry["task"] in RUNNING and not self._run_answers:
            raise ValueError(
                f"the checker of the task {entry['task']} runs answers as Python code, and nothing isolates it; leave "
                f"out the task, or set {self._key}.run_answers=true"
            )

    def value(self, response: str, row: Mapping[str, Any]) -> Any:
        entry, answer = row[REASONING_GYM], self.extract(response)
        if answer is None:
            return 0.0
        return _task(entry["task"], json.dumps(entry["options"])).score_answer(answer, entry)

    def extract(self, response: str) -> str | None:
        answer = last_block(response, self._tag)
        return None if answer is None else answer.strip()


@cache
def _task(name: str, options: str) -> Any:
    """The data set of reasoning-gym, whose options are JSON."""
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(options))
