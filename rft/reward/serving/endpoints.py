"""The protocols of a server of reward terms: how the body of a request is read, and what is answered.

| path          | protocol                                                                               |
|---------------|----------------------------------------------------------------------------------------|
| `/score`      | that of this package, see `rft.reward.services.protocol`                               |
| `/get_reward` | OpenRLHF's remote reward model (`openrlhf/utils/remote_rm_utils.py`)                   |
| `/verify`     | a resources server of NeMo-Gym (`nemo_gym/base_resources_server.py`)                   |
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from rft.batch.scores import Scores, number_or_none
from rft.reward.compose import WeightedSum

Entry = TypeVar("Entry")
TITLES: dict[type, str] = {dict: "an object", str: "a text"}


class Unanswerable(ValueError):
    """A response without a score, where the protocol has no way to say so; the message names its place."""


@dataclass(frozen=True)
class Batch:
    """What a request asks for.

    Attributes:
        responses, rows: N texts and the rows that they answer.
        body: the JSON of the request.
    """

    responses: list[str]
    rows: list[dict[str, Any]]
    body: Mapping[str, Any]


class Endpoint(ABC):
    """A path of the server.

    Attributes:
        path: of its requests.
    """

    path: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> Batch:
        """The responses in the body of a request.

        Raises:
            ValueError: the body is malformed; names the key.
        """

    @abstractmethod
    def answer(self, batch: Batch, scores: Scores, reward: WeightedSum) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            Unanswerable: a response has no score, and the protocol has no way to say so.
        """


class ScoreEndpoint(Endpoint):
    """Every term's raw value, further numbers, the reasons of missing values, and the total.

    Args:
        fingerprints: of the terms by name, and of their sum, None.
    """

    path = "/score"

    def __init__(self, fingerprints: Mapping[str | None, str]) -> None:
        self._fingerprints = fingerprints

    def read(self, body: Mapping[str, Any]) -> Batch:
        responses = _entries(body, "responses", str)
        term = body.get("term")
        if not isinstance(term, str | None) or term not in self._fingerprints:
            known = ", ".join(name for name in self._fingerprints if name is not None)
            raise ValueError(f"term: there is no term {term!r:.80}, but {known}")
        return Batch(responses, _entries(body, "rows", dict, len(responses)), body)

    def answer(self, batch: Batch, scores: Scores, reward: WeightedSum) -> dict[str, Any]:
        results = [
            {
                "total": number_or_none(scores.total[number].item()),
                "terms": _known(scores.terms, number),
                "unscored": scores.unscored[number],
                "numbers": _known(scores.numbers, number),
            }
            for number in range(len(batch.responses))
        ]
        mark = self._fingerprints[batch.body.get("term")]
        return {"id": batch.body.get("id"), "fingerprint": mark, "count": len(results), "results": results}


class GetRewardEndpoint(Endpoint):
    """OpenRLHF: the total, the value of the accuracy as `scores`, and every term as `extra_logs`."""

    path = "/get_reward"

    def read(self, body: Mapping[str, Any]) -> Batch:
        """A query is prompt and response; without prompts it is the response."""
        queries = _entries(body, "query", str)
        prompts = (
            _entries(body, "prompts", str, len(queries)) if body.get("prompts") is not None else [""] * len(queries)
        )
        labels = _list(body, "labels", len(queries)) if body.get("labels") is not None else None
        responses, rows = [], []
        for number, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
            if not query.startswith(prompt):
                raise ValueError(f"query[{number}] does not begin with prompts[{number}], so its response is unknown")
            responses.append(query[len(prompt) :])
            label = {} if labels is None else {"label": labels[number], "answer": labels[number]}
            rows.append({"prompt": prompt, **label})
        return Batch(responses, rows, body)

    def answer(self, batch: Batch, scores: Scores, reward: WeightedSum) -> dict[str, Any]:
        """A term that is missing for a response is left out of `extra_logs`."""
        accuracies = scores.accuracies(reward.accuracy_terms(batch.rows))
        for values in (scores.total, accuracies):
            _all_scored(values, scores.unscored)
        logs = {name: values.tolist() for name, values in scores.terms.items() if not values.isnan().any()}
        return {"rewards": scores.total.tolist(), "scores": accuracies.tolist(), "extra_logs": logs}


class VerifyEndpoint(Endpoint):
    """NeMo-Gym: the request with the total as `reward`, and every term by its name."""

    path = "/verify"

    def read(self, body: Mapping[str, Any]) -> Batch:
        """The row has the other fields of the request and those of `verifier_metadata`."""
        asked, response = (_object(body, name) for name in ("responses_create_params", "response"))
        extra = _object(body, "verifier_metadata") if body.get("verifier_metadata") is not None else {}
        row = {name: value for name, value in body.items() if name not in ("responses_create_params", "response")}
        return Batch([output_text(response)], [{"prompt": asked.get("input"), **row, **extra}], body)

    def answer(self, batch: Batch, scores: Scores, reward: WeightedSum) -> dict[str, Any]:
        _all_scored(scores.total, scores.unscored)
        return {**batch.body, **_known(scores.terms, 0), "reward": scores.total[0].item()}


def output_text(response: Mapping[str, Any]) -> str:
    """The text of a response of OpenAI's Responses API: its parts `output_text`, one after the other.

    Raises:
        ValueError: `output` is malformed.
    """
    texts = []
    for item in _entries(response, "output", dict):
        if item.get("type", "message") == "message":
            texts += [part.get("text") for part in _entries(item, "content", dict) if part.get("type") == "output_text"]
    return "".join(_entries({"response.output": texts}, "response.output", str))


def _known(values: Mapping[str, Tensor], number: int) -> dict[str, float]:
    """The values of a response that are not NaN."""
    return {name: column[number].item() for name, column in values.items() if not column[number].isnan()}


def _all_scored(values: Tensor, unscored: Sequence[Mapping[str, str]]) -> None:
    missing = values.isnan().nonzero().flatten().tolist()
    if missing:
        reasons = ", ".join(f"{term}: {reason}" for term, reason in unscored[missing[0]].items())
        raise Unanswerable(f"response {missing[0]} has no score ({reasons or 'no term scores it'})")


def _list(body: Mapping[str, Any], key: str, length: int | None = None) -> list[Any]:
    values = body.get(key)
    if not isinstance(values, list):
        raise ValueError(f"{key}: expected a list, got {values!r:.80}")
    if length is not None and len(values) != length:
        raise ValueError(f"{key}: expected {length} entries, got {len(values)}")
    return values


def _entries(body: Mapping[str, Any], key: str, kind: type[Entry], length: int | None = None) -> list[Entry]:
    """The entries of a list, which are all of one type."""
    values = _list(body, key, length)
    for number, value in enumerate(values):
        if not isinstance(value, kind):
            raise ValueError(f"{key}[{number}]: expected {TITLES[kind]}, got {value!r:.80}")
    return values


def _object(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key}: expected an object, got {value!r:.80}")
    return value
