"""What a run sends to servers of rewards, and what it reads from their answers, by the name of the protocol."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rft.reward.function import label, prompt_text
from rft.reward.services.protocol import SCORE, number_in, object_in, read_scores, score_body
from rft.reward.term import Unscored

Rows = Sequence[Mapping[str, Any]]
LEAF = re.compile(r"\{(response|row\.(\w+))\}")


class Protocol(ABC):
    """A kind of server.

    Attributes:
        path: of its requests, unless the yaml names another.
        one_row: a request has one response.
        fields: of a row that it needs.
    """

    path: ClassVar[str | None] = None
    one_row: ClassVar[bool] = False
    fields: tuple[str, ...] = ()

    @abstractmethod
    def body(self, responses: Sequence[str], rows: Rows) -> dict[str, Any]:
        """The JSON of a request for the values of N responses to N rows."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        """The values of the `count` responses, as `Term.values` returns them.

        Args:
            body: of the request.
            answer: its JSON.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the answer is malformed, or is that to another request.
        """


class Rft(Protocol):
    """A server of `mode=serve`; see `rft.reward.services.protocol`.

    Args:
        term: of the server; None: the sum of all.

    Attributes:
        fingerprint: of the term, or of the sum; the check of the servers sets it.
    """

    path = SCORE

    def __init__(self, term: str | None) -> None:
        self.fingerprint: str | None = None
        self._term = term

    def body(self, responses: Sequence[str], rows: Rows) -> dict[str, Any]:
        """See `Protocol.body`."""
        return score_body(responses, rows, self._term)

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        """See `Protocol.read`."""
        return read_scores(body, answer, self.fingerprint)


class OpenRLHF(Protocol):
    """OpenRLHF's remote reward model: `rewards` of queries, and `extra_logs`, which are further numbers."""

    path = "/get_reward"
    fields = ("prompt",)

    def body(self, responses: Sequence[str], rows: Rows) -> dict[str, Any]:
        """See `Protocol.body`. A query is prompt and response."""
        prompts = [prompt_text(row) for row in rows]
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        return {"query": queries, "prompts": prompts, "labels": [label(row) for row in rows]}

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        """See `Protocol.read`."""
        rewards = _column(answer["rewards"], "rewards", count)
        logs = object_in(answer.get("extra_logs") or {}, "extra_logs")
        columns = {name: _column(values, f"extra_logs.{name}", count) for name, values in logs.items()}
        return [
            {**{name: column[number] for name, column in columns.items()}, "score": rewards[number]}
            for number in range(count)
        ]


class NemoGym(Protocol):
    """A resources server of NeMo-Gym: the `reward` of one response, unless its `mask_sample` is true."""

    path = "/verify"
    one_row = True
    fields = ("prompt",)

    def body(self, responses: Sequence[str], rows: Rows) -> dict[str, Any]:
        """See `Protocol.body`. The fields of the row stand beside the response, as NeMo-Gym's own rows have them."""
        (text,), (row,) = responses, rows
        prompt = row["prompt"]
        asked = {"input": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        response = {"id": "resp", "object": "response", "created_at": 0, "model": "policy", "output": [message]}
        response |= {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        beside = {name: value for name, value in row.items() if name != "prompt"}
        return {"responses_create_params": asked, **beside, "response": response}

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        """See `Protocol.read`."""
        verdict = object_in(answer, "the answer")
        if verdict.get("mask_sample", False) is not False:
            return [Unscored(str(verdict.get("failure_kind") or "masked"))]
        return [number_in(verdict["reward"], "reward")]


class Mapped(Protocol):
    """A server with another protocol.

    Args:
        request: the JSON of a request. A leaf `{response}` or `{row.<field>}` is the value itself; within a longer text
            it is inserted.
        score: the place of the value in the answer: keys and positions with points between them.
    """

    one_row = True

    def __init__(self, request: Mapping[str, Any], score: str) -> None:
        self._request = request
        self._score = score
        self.fields = tuple(sorted({field for _, field in LEAF.findall(repr(request)) if field}))

    def body(self, responses: Sequence[str], rows: Rows) -> dict[str, Any]:
        """See `Protocol.body`."""
        filled: dict[str, Any] = fill(self._request, responses[0], rows[0])
        return filled

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        """See `Protocol.read`."""
        found = answer
        for step in self._score.split("."):
            found = found[int(step)] if isinstance(found, list) else object_in(found, self._score)[step]
        return [number_in(found, self._score)]


def fill(node: Any, response: str, row: Mapping[str, Any]) -> Any:
    """The template of a request with its leaves filled in; see `Mapped`."""

    def value(leaf: re.Match[str]) -> Any:
        return response if leaf[1] == "response" else row[leaf[2]]

    if isinstance(node, Mapping):
        return {key: fill(part, response, row) for key, part in node.items()}
    if isinstance(node, list | tuple):
        return [fill(part, response, row) for part in node]
    if not isinstance(node, str):
        return node
    if (whole := LEAF.fullmatch(node)) is not None:
        return value(whole)
    return LEAF.sub(lambda leaf: str(value(leaf)), node)


def _column(values: Any, place: str, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{place}: expected a list of {count} numbers, got {values!r:.80}")
    return [number_in(value, f"{place}[{number}]") for number, value in enumerate(values)]
