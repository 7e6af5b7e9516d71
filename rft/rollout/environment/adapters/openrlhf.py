"""Environments that are written for OpenRLHF: the class `AgentInstance` of a file for `--agent_func_path`."""

import inspect
import re
from pathlib import Path
from typing import Any

from rft.imports import import_named

MARKER = re.compile(r"<\|[^|<>]+\|>|</?s>|<(start|end)_of_turn>")  # of chat templates
RESULT = ("rewards", "scores", "environment_feedback", "done", "extra_logs")  # what `step` may return


class OpenRlhf:
    """An environment that is an `AgentInstance`, with `reset(states)` and `step(states)`.

    `states` has what OpenRLHF gives: `observation` and `label` for `reset`; `observation_text`, `action_text`, `label`
    and `sampling_params`, which is None, for `step`. Observations are texts without the chat template: the contents of
    the prompt's messages with an empty line between them, and what was said behind it.

    Args:
        path: of the file.
        name: of the class.
        label: the field of the row that is the label; None where a row lacks it.
        markers: texts that are taken out of `environment_feedback`, which in OpenRLHF has the markers of the chat
            template: here it is the content of a message, and the template writes them.

    Raises:
        ValueError: the file cannot be imported, has no such class, or its `AgentExecutor` has a loop of its own.
    """

    @classmethod
    def prepare(cls, *, path: str, name: str, **options: Any) -> None:
        """Imports the file. Raises as the constructor."""
        _load(path, name)

    def __init__(self, *, path: str, name: str, label: str, markers: list[str]) -> None:
        self._class = _load(path, name)
        self._label_field = label
        self._markers = markers
        self._instance: Any = None
        self._label: Any = None
        self._text = ""

    async def reset(self, *, prompt: Any, **row: Any) -> str | None:
        """What the instance's `reset` adds behind the prompt.

        Raises:
            ValueError: it returns another prompt.
        """
        self._label = row.get(self._label_field)
        self._instance = self._class.__new__(self._class)
        made = self._class.__init__(self._instance)
        if inspect.isawaitable(made):  # instances were actors of Ray, whose constructors may be coroutines
            await made
        self._text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
        found = await self._instance.reset({"observation": self._text, "label": self._label})
        observation = found["observation"]
        if not observation.startswith(self._text):
            raise ValueError(
                f"reset returned the observation {observation!r:.80}, which does not begin with the prompt; the prompt "
                "is that of the row, and reset can only add to it"
            )
        added = observation.removeprefix(self._text)
        self._text = observation
        return self._message(added) or None

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Gymnasium's tuple of what the instance's `step` returns: the feedback, its `rewards` and `done`.

        Raises:
            ValueError: it returns something else, such as sampling parameters, or feedback with markers of a template.
        """
        states = {
            "observation_text": self._text,
            "action_text": action,
            "label": self._label,
            "sampling_params": None,
        }
        found = await self._instance.step(states)
        if refused := [name for name, value in found.items() if name not in RESULT and value is not None]:
            raise ValueError(f"step returned {', '.join(refused)}, which is not supported; leave it out")
        self._text += action + found["environment_feedback"]
        feedback = self._message(found["environment_feedback"]).strip()
        return feedback, float(found["rewards"]), bool(found["done"]), False, {}

    def _message(self, text: str) -> str:
        """A text as the content of a message."""
        for marker in self._markers:
            text = text.replace(marker, "")
        if left := MARKER.search(text):
            raise ValueError(
                f"the text {text!r:.80} has the marker {left[0]!r} of a chat template, which writes it itself; add "
                "the marker, and the role behind it, to `markers`"
            )
        return text


def _load(path: str, name: str) -> Any:
    """The class of the file. Raises as the constructor of `OpenRlhf`."""
    if not path.endswith(".py") or not Path(path).expanduser().is_file():
        raise ValueError(f"path={path}: name the Python file of --agent_func_path")
    try:
        found: Any = import_named(path, name, f"path={path}", "class")
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and "'openrlhf" in str(error.__cause__):
            raise ValueError(f"{error}; the file imports the package openrlhf: pip install openrlhf") from error
        raise
    executor = vars(inspect.getmodule(found)).get("AgentExecutor")
    if executor is not None and "execute" in vars(executor):
        raise ValueError(
            f"path={path}: AgentExecutor.execute is a loop of its own, which is not run; remove it if it runs "
            f"{name} alone, or write it as environment=agent"
        )
    return found
