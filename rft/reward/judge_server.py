"""A judge behind an address that speaks OpenAI's chat completions, as the servers of vLLM and SGLang do."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from rft.reward.grade import Grade, about_one
from rft.reward.term import Term

BUSY = (408, 409, 429)  # the same call may succeed later, as after any failure of the server's own (5xx)
PAUSE_S = 0.25  # before the second call twice as long, and twice that before each later one
SHOWN = 500  # bytes of a refusal that a message quotes


class JudgeFailed(OSError):
    """A judge that did not answer; the message names the key, the address and what it said."""


class ServedJudge(Term):
    """What a served model says of each response, at temperature 0, is read by a regular expression.

    Args:
        key: supplied; its place in the yaml.
        address: of the server, with the version: http://host:8000/v1.
        model: its name there.
        question: what is asked about a response, see `SampleRequest`.
        grade: how the text becomes a number, see `Grade`.
        system: message in front of the question, or null.
        max_new_tokens: of the judge's text.
        body: more fields of the request, such as those of the chat template.
        token: the name of the environment variable that holds the key of the server, or null where it asks for none.
        concurrency: questions at work at once, of each process.
        deadline_s: seconds that one call may take.
        tries: calls for one question before the run ends.

    Raises:
        ValueError: question or grade are wrong, or a number is below 1; names the key.
    """

    def __init__(
        self,
        key: str,
        address: str,
        model: str,
        question: dict[str, Any],
        grade: dict[str, Any],
        system: str | None,
        max_new_tokens: int,
        body: dict[str, Any],
        token: str | None,
        concurrency: int,
        deadline_s: float,
        tries: int,
    ) -> None:
        for name, number in (("concurrency", concurrency), ("tries", tries), ("max_new_tokens", max_new_tokens)):
            if number < 1:
                raise ValueError(f"{key}.{name}={number}: set it to 1 or more")
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{key}.address={address}: write it as http://host:8000/v1")
        self._key = key
        self._address = address.rstrip("/")
        self._model = model
        self._question = about_one(question, key)
        self._grade = Grade.of(grade, self._question.words, f"{key}.grade")
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._body = {"model": model, "temperature": 0.0, "max_tokens": max_new_tokens, **body}
        self._token = token
        self._concurrency = concurrency
        self._deadline = deadline_s
        self._tries = tries
        self.reads = self._question.reads

    def check(self) -> None:
        """Asks the server for its models."""
        if self._token is not None and self._token not in os.environ:
            raise ValueError(f"{self._key}.token={self._token}: there is no such environment variable; set it")
        try:
            known = self._call("/models", None, lambda answer: [model["id"] for model in answer["data"]])
        except JudgeFailed as error:
            raise ValueError(str(error)) from error
        if self._model not in known:
            raise ValueError(
                f"{self._key}.model={self._model}: {self._address} serves {', '.join(known)}; name one of these"
            )

    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """See `Term.values`.

        Raises:
            JudgeFailed: a question was not answered in as many calls as there may be.
        """
        asked = [self._question.ask(row, response=text) for text, row in zip(responses, rows, strict=True)]
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self._ask, asked))

    def _ask(self, question: str) -> float:
        messages = [*self._system, {"role": "user", "content": question}]
        body = self._body | {"messages": messages}
        return self._grade(self._call("/chat/completions", body, _text))

    def _call(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], Any]) -> Any:
        """What is read in the answer to a GET, or to a POST of a body."""
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {os.environ[self._token]}"
        request = urllib.request.Request(
            self._address + path, None if body is None else json.dumps(body).encode(), headers
        )
        for number in range(1, self._tries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._deadline) as answer:
                    return read(json.load(answer))
            except urllib.error.HTTPError as error:
                said = f"status {error.code}: {error.read(SHOWN).decode(errors='replace')}"
                if error.code not in BUSY and error.code < 500:
                    break
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                said = f"{type(error).__name__}: {error}"
            if number < self._tries:
                time.sleep(PAUSE_S * 2**number)
        raise JudgeFailed(
            f"{self._key}.address={self._address}: {path} failed in call {number} with {said}; see to the server, or "
            f"raise {self._key}.tries={self._tries} or {self._key}.deadline_s={self._deadline:g}"
        )


def _text(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"] or ""
