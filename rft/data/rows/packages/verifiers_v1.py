"""Rows of an environment of `verifiers.v1`, an extra: the tasks of its taskset, which it scores itself.

That is version 0.4 of the package verifiers. A process of its own loads them, as those of earlier versions.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rft.data.rows.packages.child import check_rows, rows_of_child
from rft.ranges import PositiveInt

MISSING = 'the package verifiers, 0.4 or later, is not installed; pip install "rft[verifiers_v1]"'
FIELD = "task"  # of a row: the data of the task


class VerifiersTasks:
    """The tasks of a taskset: `prompt`, the messages before the first answer, and `task`, the data of the task.

    Args:
        env: the config of the environment, as `verifiers.v1.resolve_env_config` takes it.
        limit: takes the first `limit` tasks, or all if null.
        key: supplied by the run: the yaml key of the node, for messages.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, env: dict[str, Any], limit: PositiveInt | None, key: str) -> None:
        if importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"{key}: {MISSING}")
        self._env = env
        self._limit = limit
        self._key = key

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """The rows, in the order of the taskset.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: the environment cannot be loaded, its taskset has no end and there is no limit, or a task has no
                prompt.
        """
        rows = rows_of_child(generate, self._env, self._limit, self._key)
        check_rows(rows, required, "task", 0, self._key)
        return rows


def load_environment(env: dict[str, Any]) -> Any:
    """The environment of a config.

    Args:
        env: as in `VerifiersTasks`.

    Raises:
        ValueError: the package, the taskset or the harness is not installed, the config is wrong, or several agents
            play.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(MISSING)
    if (version := importlib.metadata.version("verifiers")).startswith(("0.1.", "0.2.", "0.3.")):
        raise ValueError(f"{MISSING}, or choose environment=verifiers, which is for {version}")
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    try:
        config = vf.resolve_env_config(env)
        made = vf.load_environment(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"env: {error}") from error
    if len(agents := agent_config_fields(config)) != 1:
        raise ValueError(
            f"env: {type(made).__name__} has several agents ({', '.join(agents)}), and here one policy plays; "
            "choose an environment of one agent"
        )
    return made


def generate(env: dict[str, Any], limit: int | None, key: str) -> list[dict[str, Any]]:
    """The rows; see `VerifiersTasks`."""
    try:
        tasks = load_environment(env).taskset
    except ValueError as error:
        raise ValueError(f"{key}.{error}" if str(error).startswith("env: ") else f"{key}: {error}") from error
    if limit is None and not tasks.bounded:
        raise ValueError(f"{key}.limit=null: the taskset has no end; give the number of tasks")
    rows = []
    for number, task in enumerate(islice(tasks, limit)):
        data = task.data.model_dump(mode="json", exclude_none=True)
        if not data.get("prompt"):
            raise ValueError(f"{key}: task {number} has no prompt; choose a taskset whose tasks have one")
        asked = data["prompt"]
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        system = [{"role": "system", "content": data["system_prompt"]}] if "system_prompt" in data else []
        rows.append({"prompt": system + messages, FIELD: data})
    return rows
