"""The format of gpt-oss: messages with a channel, and a recipient if they are calls."""

import re
from collections.abc import Mapping

from rft.data.tool_calls.base import TOOL_CALLS, Found, Schema, ToolCall, named_call

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BEHIND = re.compile("|".join(map(re.escape, (START, *ENDS))))
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@TOOL_CALLS.register("harmony", marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS), openings=(CHANNEL,))
def harmony(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.

    The recipient may also stand before the channel. A message to a recipient is a call. Another one of the channel
    `analysis` is a thought, and any other is content. The template of gpt-oss writes the content of an answer with
    calls to `analysis`, and drops the thoughts of an answer without calls. So the content of an answer with calls
    begins with its thoughts, that of another one has no thoughts unless it has nothing else.
    """
    thoughts: list[str] = []
    content: list[str] = []
    found: list[ToolCall | str] = []
    place = 0
    while place < len(text):
        start = text.find(MESSAGE, place)
        head = text[place : start if start >= 0 else len(text)]
        recipient = RECIPIENT.search(head)
        if start < 0:
            if recipient is not None:
                found.append(f"the call of {recipient[1]} has no {MESSAGE}")
            elif not place:  # an answer without channels
                return text.strip(), []
            break
        end = BEHIND.search(text, start)
        body = text[start + len(MESSAGE) : end.start() if end else len(text)]
        if recipient is not None:
            call = named_call(recipient[1], body)
            cut = end is None and isinstance(call, str)
            found.append(f"the call of {recipient[1]} is not closed" if cut else call)
        else:
            (thoughts if f"{CHANNEL}analysis" in head else content).append(body.strip())
        place = len(text) if end is None else end.start() if end[0] == START else end.end()
    shown = [*thoughts, *content] if found else content or thoughts
    return "\n\n".join(part for part in shown if part), found
