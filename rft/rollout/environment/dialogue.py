"""A conversation of sampled answers and given messages, held as token ids. No answer is encoded again."""

import copy
from typing import Any

from rft.batch.encoded import EncodedText
from rft.batch.trajectory import Segment
from rft.rollout.answers import Answer
from rft.rollout.environment.turn_template import Message, NoSuffix, Tools, TurnTemplate


class Dialogue:
    """One conversation: an opening, then answers and messages of the environment in turn.

    Sampled tokens stay in the context as they are, also where the chat template would rewrite them, such as one that
    drops the thoughts of earlier answers. Where neither the renderer of the run nor the template has a suffix for the
    messages, the dialogue forks: a new row begins with all messages as the template renders them, and the answers in it
    are given tokens.

    Args:
        template: of the run.
        messages: up to the first answer.
        tools: schemas of functions; None for those of `data.tools`.
        prompt: the tokens of the messages; None for those of `TurnTemplate.opening`.

    Attributes:
        prompt: the token ids of the next request: all of the last row.
        opening: tokens of the first prompt.
        forks: the reason of each fork.

    Raises:
        ValueError: as for `TurnTemplate.opening`.
    """

    def __init__(
        self,
        template: TurnTemplate,
        messages: list[Message],
        tools: Tools = None,
        prompt: EncodedText | None = None,
    ) -> None:
        self.forks: list[str] = []
        self.prompt = template.opening(messages, tools) if prompt is None else prompt
        self.opening = len(self.prompt)
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._rows = [[Segment(self.prompt, trains=False)]]
        self._start = 0  # of the last answer in the prompt
        self._end: int | None = None

    @property
    def rows(self) -> list[list[Segment]]:
        """The segments of each batch row, up to its last answer. Each answer is sampled in one row."""
        rows = [row if row[-1].sampled else row[:-1] for row in self._rows]
        return [row for row in rows if row]

    def answer(self, answer: Answer, message: dict[str, Any]) -> None:
        """Appends an answer to the prompt.

        Args:
            answer: to `prompt`.
            message: what was parsed of it: `content`, and `tool_calls` as the template takes them. A fork renders it.
        """
        assert not self._rows[-1][-1].sampled, "messages stand between two answers"
        self._start = len(self.prompt)
        for segment in answer.segments:
            self._append(segment)
        if self._messages[-1]["role"] == "assistant":  # the prompt began the answer
            start = self._messages.pop()
            message = {**message, "content": start["content"] + (message.get("content") or "")}
        self._messages.append({**message, "role": "assistant"})
        self._end = self.prompt[-1] if answer.finish.reason == "stop" else None

    def extend(self, messages: list[Message]) -> None:
        """Appends messages of the environment to the answer.

        Args:
            messages: at least one, of role `user` or `tool`. One of role `tool` without `name` and `tool_call_id` has
                those of the answer's call with its id, or else of the call in its place.

        Raises:
            ValueError: the template cannot render them.
        """
        assert messages and self._rows[-1][-1].sampled, "messages follow an answer"
        messages = _with_calls(messages, self._messages[-1].get("tool_calls") or [])
        self._messages += messages
        try:
            suffix = self._template.continuation(self.prompt, self._start, messages, self._end, self._tools)
            self._append(Segment(suffix, trains=False))
        except NoSuffix as reason:
            self.forks.append(str(reason))
            self.prompt = self._template.rendered(self._messages, self._tools)
            self._rows.append([Segment(self.prompt, trains=False)])

    def extended(self, messages: list[Message]) -> "Dialogue":
        """A longer dialogue; this one stays as it is. Arguments and errors are those of `extend`."""
        longer = copy.copy(self)
        longer.forks, longer._messages = list(self.forks), list(self._messages)
        longer._rows = [list(row) for row in self._rows]
        longer.extend(messages)
        return longer

    def _append(self, segment: Segment) -> None:
        self._rows[-1].append(segment)
        self.prompt = self.prompt + segment.tokens


def _with_calls(messages: list[Message], calls: list[dict[str, Any]]) -> list[Message]:
    """The messages; results of calls have the names and ids of the calls, which templates of some models write."""
    by_id = {call["id"]: call for call in calls if call.get("id") is not None}
    places, named = iter(calls), []
    for message in messages:
        if message["role"] == "tool" and (place := next(places, None)):
            call = by_id.get(message.get("tool_call_id"), place)
            message = {"name": call.get("function", call)["name"], "tool_call_id": call.get("id"), **message}
        named.append(message)
    return named
