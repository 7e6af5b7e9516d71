"""Draws the dialogue of an episode: its prompt, and the turns behind it. A bar marks those that the policy wrote."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rft.report.page import LONGEST, cut

NUMBERS = ("turns", "tool_calls", "tool_failures", "environment_s", "reward", "failed")  # entries shown below


def draw_episode(record: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """HTML of the prompt and of the turns behind it, and the numbers of the episode; see `dialogue` and `facts`."""
    return *dialogue(record), facts(record)


def dialogue(record: Mapping[str, Any]) -> tuple[str, str]:
    """HTML of the messages of the prompt, and of those behind it, of which the assistant's train.

    Args:
        record: see `EpisodeRecord`.
    """
    messages, opening = record["messages"], record["opening"]
    return _drawn(messages[:opening], "given"), _drawn(messages[opening:], "trains")


def facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an episode, without those that are 0 or missing."""
    found = {name: record[name] for name in NUMBERS if record[name]}
    return found | ({"forks": ", ".join(record["forks"])} if record["forks"] else {})


def _drawn(messages: Sequence[Mapping[str, Any]], kind: str) -> str:
    found = []
    for message in messages:
        role, text = message["role"], html.escape(cut(str(message.get("content") or ""), LONGEST))
        calls = "".join(
            f'<div class="call">{html.escape(cut(_call(call), LONGEST))}</div>'
            for call in message.get("tool_calls", ())
        )
        marked = f" {kind}" if role == "assistant" else ""
        label = f"<small>{html.escape(role)}</small>" if len(messages) > 1 else ""
        found.append(f'<div class="turn{marked}">{label}<div class="text">{text}</div>{calls}</div>')
    return "".join(found)


def _call(call: Mapping[str, Any]) -> str:
    """`price(item="tea")`. A message of the data may have the JSON text of the arguments, which is shown as it is."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name')}({arguments})"
