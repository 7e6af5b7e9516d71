"""Rows of an environment of the package `verifiers`, an extra: its own questions, which its rubric scores.

A process of its own loads them: an environment of verifiers replaces the signal handlers of its process.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

from rft.data.rows.files import without_nulls
from rft.data.rows.packages.child import check_rows, rows_of_child
from rft.errors import prefixed
from rft.ranges import PositiveInt

MISSING = 'the package verifiers is not installed; pip install "rft[verifiers]"'


class VerifiersRows:
    """The rows of a data set of an environment, with all fields that its rubric reads: `prompt`, `answer`, `info`, ...

    Args:
        id: the name of the environment, as `verifiers.load_environment` takes it.
        args: arguments of its `load_environment`.
        split: `train` or `eval`, the data sets that an environment can have.
        limit: takes the first `limit` rows, or all if null.
        key: supplied by the run: the yaml key of the node, for messages.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(
        self, id: str, args: dict[str, Any], split: Literal["train", "eval"], limit: PositiveInt | None, key: str
    ) -> None:
        if importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"{key}: {MISSING}")
        self._id = id
        self._args = args
        self._split = split
        self._limit = limit
        self._key = key

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """The rows, in their order.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: the environment cannot be loaded or has no such data set, or a row lacks a field.
        """
        rows = rows_of_child(generate, self._id, self._args, self._split, self._limit, self._key)
        check_rows(rows, required, f"{self._id}[{self._split}] row", 1, self._key)
        return rows


def load_environment(id: str, args: dict[str, Any]) -> Any:
    """The environment, in this process, whose signal handlers it replaces.

    Args:
        id, args: as in `VerifiersRows`.

    Raises:
        ValueError: the package or the environment is not installed, the environment refuses its arguments, or its
            rubric compares the answers of a group.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(MISSING)
    import verifiers

    try:
        environment = verifiers.load_environment(id, **args)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"id={id}: {error}") from error
    if environment.requires_group_rollouts:
        raise ValueError(
            f"id={id}: its rubric scores all answers to a prompt together, and here each episode is scored alone; "
            "write a rubric whose functions take one completion"
        )
    return environment


def generate(
    id: str, args: dict[str, Any], split: Literal["train", "eval"], limit: int | None, key: str
) -> list[dict[str, Any]]:
    """The rows; see `VerifiersRows`."""
    with prefixed(f"{key}: "):
        environment = load_environment(id, args)
    table = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    if table is None:
        raise ValueError(
            f"{key}.split={split}: the environment {id} has no such data set; split the other one, with "
            "rft.data.rows.split.HashSplit, or choose other rows"
        )
    rows = table.to_list() if limit is None else table.select(range(min(limit, len(table)))).to_list()
    return [row | without_nulls({"prompt": row["prompt"]}) for row in rows]
