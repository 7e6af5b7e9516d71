"""A judge behind a server with OpenAI's chat completions API, which vLLM and SGLang have too."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rft.ranges import PositiveInt, Seconds
from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.retry import Backoff, RetryPolicy
from rft.reward.models.grade import Grade, about_one
from rft.reward.term import Term, Unscored

PAUSES_S = (0.5, 60.0)  # the shortest and the longest pause between two calls


class JudgeFailed(OSError):
    """A judge that returned no verdict; the message names the yaml key, the address and the problem."""


class ServedJudge(Term):
    """Asks a served model about each response, at temperature 0, and reads its text with a regular expression.

    Args:
        key: supplied; the term's place in the yaml.
        address: of the server, with the version: http://host:8000/v1.
        model: its name on the server.
        question: the question about a response, see `Question`.
        grade: how the text becomes a number, see `Grade`.
        system: message in front of the question, or null.
        max_new_tokens: of the judge's text.
        body: more fields of the request, such as those of the chat template.
        token: the name of the environment variable that holds the server's API key, or null where it needs none.
        concurrency: requests in flight of each process.
        deadline_s: seconds that one call may take.
        tries: calls for one question.

    Raises:
        ValueError: question, grade or address are malformed, or a number is below 1; names the key.
    """

    awaits = True

    def __init__(
        self,
        key: str,
        address: str,
        model: str,
        question: dict[str, Any],
        grade: dict[str, Any],
        system: str | None,
        max_new_tokens: PositiveInt,
        body: dict[str, Any],
        token: str | None,
        concurrency: PositiveInt,
        deadline_s: Seconds,
        tries: PositiveInt,
    ) -> None:
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
        self._policy = RetryPolicy(concurrency=concurrency, retries=tries - 1, answer_s=deadline_s)
        self.reads = self._question.reads

    def check(self) -> None:
        """Checks that the server has the model. Raises a ValueError that names the key and the cure."""
        if self._token is not None and self._token not in os.environ:
            raise ValueError(f"{self._key}.token={self._token}: there is no such environment variable; set it")
        try:
            known = asyncio.run(self._models())
        except JudgeFailed as error:
            raise ValueError(str(error)) from error
        if self._model not in known:
            raise ValueError(
                f"{self._key}.model={self._model}: {self._address} serves {', '.join(known)}; name one of these"
            )

    async def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """See `Term.values`; a question without an answer within the allowed calls is `Unscored`."""
        questions = [self._question.ask(row, response=text) for text, row in zip(responses, rows, strict=True)]
        return await self._ask_all(questions)

    async def _ask_all(self, questions: Sequence[str]) -> list[float | Unscored]:
        client, slots = self._client(), asyncio.Semaphore(self._policy.concurrency)

        async def ask(question: str) -> float | Unscored:
            async with slots:
                try:
                    return self._grade(await self._text(client, question))
                except JudgeFailed as error:
                    return Unscored(f"no answer: {error}")

        return await asyncio.gather(*map(ask, questions))

    async def _text(self, client: ServerClient, question: str) -> str:
        """The judge's text."""
        body = self._body | {"messages": [*self._system, {"role": "user", "content": question}]}

        async def post() -> str:
            answer = await client.post("/chat/completions", body)
            with client.parse("the answer of /chat/completions"):
                return str(answer["choices"][0]["message"]["content"] or "")

        return await self._repeat(post)

    async def _models(self) -> list[str]:
        """The models that the server has."""
        client = self._client()

        async def get() -> list[str]:
            answer = await client.get("/models")
            with client.parse("the answer of /models"):
                return [str(model["id"]) for model in answer["data"]]

        return await self._repeat(get)

    async def _repeat(self, request: Any) -> Any:
        what = f"{self._key}.address={self._address}: waits for an answer"
        try:
            return await self._policy.repeat(what, request, Backoff(*PAUSES_S))
        except RequestFailed as error:
            raise JudgeFailed(
                f"{error}; check the server, or raise {self._key}.tries={self._policy.retries + 1} or "
                f"{self._key}.deadline_s={self._policy.answer_s:g}"
            ) from error

    def _client(self) -> ServerClient:
        headers = {} if self._token is None else {"Authorization": f"Bearer {os.environ[self._token]}"}
        return ServerClient(f"{self._key}.address={self._address}", self._address, headers, use_proxies=True)
