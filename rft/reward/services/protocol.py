"""What a run sends to servers of rewards and reads from their answers: the protocol of `mode=serve`, and others.

POST /score {"id": text, "term": name or null, "responses": [N texts], "rows": [N objects]} is answered with {"id": the
same text, "fingerprint": of the term, or of all with null, "count": N, "results": [N objects]}. A result has `total` (a
number, or null without a score), `terms` and `numbers` (values by name, without those that are missing) and `unscored`
(the reason by the name of every term without a value).

GET /health is answered with {"ready": true, "terms": {name: fingerprint}, "sum": fingerprint of all, "rows": most
responses of a request, ...}.
"""

import hashlib
import json
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rft.reward.function import label, prompt_text
from rft.reward.term import Unscored

Rows = Sequence[Mapping[str, Any]]
LEAF = re.compile(r"\{(response|row\.(\w+))\}")
SCORE, HEALTH = "/score", "/health"
NO_SCORE = "no_score"


def fingerprint(options: Mapping[str, Any]) -> str:
    """A hash of options of the yaml: equal options compute the same values."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]


def score_body(responses: Sequence[str], rows: Sequence[Mapping[str, Any]], term: str | None) -> dict[str, Any]:
    """The body of a request for the values of a term, or the totals (None), of N responses to N rows."""
    return {"id": secrets.token_hex(8), "term": term, "responses": list(responses), "rows": list(rows)}


def read_scores(body: Mapping[str, Any], answer: Any, expected: str | None) -> list[Any]:
    """The values in the answer to a request.

    Args:
        body: of the request.
        answer: its JSON.
        expected: the fingerprint that the servers had before the run; None: they were not asked.

    Returns:
        For each response a mapping with the value as `score` and the numbers beside it, or `Unscored`.

    Raises:
        KeyError, TypeError, ValueError: the answer is malformed, or that to another request or with other options.
    """
    if answer["id"] != body["id"]:
        raise ValueError(f"it is for the request {answer['id']!r:.40}, not for {body['id']!r}")
    if expected is not None and answer["fingerprint"] != expected:
        raise ValueError(f"its options are not those that were checked (fingerprint {answer['fingerprint']!r:.40})")
    results, count, term = answer["results"], len(body["responses"]), body["term"]
    if type(answer["count"]) is not int or not answer["count"] == len(results) == count:
        raise ValueError(f"count={answer['count']!r:.40} and {len(results)} results for {count} responses")
    return [_total(one) if term is None else _value(one, term) for one in results]


def number_in(value: Any, place: str) -> float:
    """A finite number of an answer; raises a ValueError that names the place for anything else, true and false too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place}: {value!r:.40} is no number")
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{place}: {value!r:.40} is not finite")
    return float(value)


def numbers_in(values: Any, place: str) -> dict[str, float]:
    """The numbers of an object; raises a ValueError as `number_in`."""
    return {name: number_in(value, f"{place}.{name}") for name, value in object_in(values, place).items()}


def object_in(value: Any, place: str) -> dict[str, Any]:
    """An object of an answer; raises a ValueError that names the place for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{place}: {value!r:.40} is no object")
    return value


def check_json(row: Mapping[str, Any], cure: str) -> None:
    """Checks that the fields of a row are JSON; raises a ValueError that names the one that is not, and the cure."""
    for field, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the field {field!r} is no JSON ({error}); {cure}") from error


def _value(result: Mapping[str, Any], term: str) -> Any:
    """The value of one term, with its further numbers."""
    unscored, terms = object_in(result["unscored"], "unscored"), object_in(result["terms"], "terms")
    if term in unscored or term not in terms:
        return Unscored(str(unscored.get(term, NO_SCORE)))
    numbers = numbers_in(result["numbers"], "numbers")
    beside = {name.removeprefix(f"{term}/"): value for name, value in numbers.items() if name.startswith(f"{term}/")}
    return {**beside, "score": number_in(terms[term], f"terms.{term}")}


def _total(result: Mapping[str, Any]) -> Any:
    """The weighted sum, with the values of the terms."""
    unscored = object_in(result["unscored"], "unscored")
    if result["total"] is None:
        reasons = [f"{term} {reason}" for term, reason in unscored.items()]
        return Unscored(reasons[0] if reasons else NO_SCORE)
    return {**numbers_in(result["terms"], "terms"), "score": number_in(result["total"], "total")}


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
        return score_body(responses, rows, self._term)

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        return read_scores(body, answer, self.fingerprint)


class OpenRLHF(Protocol):
    """OpenRLHF's remote reward model: `rewards` of queries, and `extra_logs`, which are further numbers."""

    path = "/get_reward"
    fields = ("prompt",)

    def body(self, responses: Sequence[str], rows: Rows) -> dict[str, Any]:
        """A query is prompt and response."""
        prompts = [prompt_text(row) for row in rows]
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        return {"query": queries, "prompts": prompts, "labels": [label(row) for row in rows]}

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
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
        """The fields of the row stand beside the response, as NeMo-Gym's own rows have them."""
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
        filled: dict[str, Any] = fill(self._request, responses[0], rows[0])
        return filled

    def read(self, body: Mapping[str, Any], answer: Any, count: int) -> list[Any]:
        value = answer
        for step in self._score.split("."):
            value = value[int(step)] if isinstance(value, list) else object_in(value, self._score)[step]
        return [number_in(value, self._score)]


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
