"""Rows of reasoning-gym (arXiv 2505.24760): generated problems of about a hundred tasks, each with a checker.

A process of its own generates the rows with a fixed hash seed. The rows of some tasks depend on the order of sets of
texts, which differs between processes otherwise: each rank would train on other rows.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from rft.data.rows.packages import REASONING_GYM
from rft.data.rows.packages.child import rows_of_child
from rft.errors import did_you_mean
from rft.ranges import PositiveInt, Seed

APART = 1_000_003  # reasoning-gym makes problem n of a seed from seed + n, so close seeds would share problems
Tasks = Mapping[str, Mapping[str, Any]]


class ReasoningGymRows:
    """Problems of some tasks: `prompt`, `answer` where there is one right answer, `data_source` and `reasoning_gym`.

    Args:
        tasks: {name of a task: its options}, those of the task's configuration in reasoning-gym.
        count: rows of each task.
        seed: of the problems; other seeds give other problems, up to a million of a task.
        key: supplied by the run: the yaml key of the node, for messages.

    Raises:
        ValueError: there is no task, an option of one is set by `count` or `seed`, or the package is not installed.
    """

    def __init__(self, tasks: dict[str, dict[str, Any]], count: PositiveInt, seed: Seed, key: str) -> None:
        if not tasks:
            raise ValueError(f"{key}.tasks is empty: name a task and its options, such as {{chain_sum: {{}}}}")
        for task, options in tasks.items():
            if taken := {"size": "count", "seed": "seed"}.keys() & options.keys():
                raise ValueError(f"{key}.tasks.{task}.{min(taken)}: remove it; {key}.count and {key}.seed set it")
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(f'{key} needs the package reasoning-gym: pip install "rft[reasoning_gym]"')
        self._tasks = tasks
        self._count = count
        self._seed = seed
        self._key = key

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """The rows, task by task.

        Args:
            required: fields that every row must have.

        Raises:
            ValueError: there is no such task or option, or the rows lack a field.
        """
        rows = rows_of_child(generate, self._tasks, self._count, self._seed, self._key)
        for row in rows:
            if missing := [field for field in required if field not in row]:
                raise ValueError(
                    f"{self._key}.tasks.{row[REASONING_GYM]['task']}: its rows have no field {missing[0]!r}; they have "
                    f"{', '.join(row)}; choose reward=reasoning_gym, or leave out the task"
                )
        return rows


def generate(tasks: Tasks, count: int, seed: int, key: str) -> list[dict[str, Any]]:
    """The rows; raises a ValueError for an unknown task or option, or an option out of its range."""
    return [row for task, options in tasks.items() for row in _rows(task, dict(options), count, seed, key)]


def _rows(task: str, options: dict[str, Any], count: int, seed: int, key: str) -> list[dict[str, Any]]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise ValueError(f"{key}.tasks.{task}: reasoning-gym has no such task{did_you_mean(task, DATASETS)}")
    try:
        problems = create_dataset(task, **options, seed=seed * APART % 2**31, size=count)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{key}.tasks.{task}: reasoning-gym refuses the options {options} ({error})") from error
    rows = []
    for number in range(count):
        problem = problems[number]
        entry = {"task": task, "options": options, **problem}
        answer = {} if problem["answer"] is None else {"answer": problem["answer"]}
        rows.append(
            {"prompt": problem["question"], **answer, "data_source": f"reasoning_gym/{task}", REASONING_GYM: entry}
        )
    return rows
