"""A judge behind servers with OpenAI's chat completions API, which vLLM and SGLang have too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft.data.encode.media.folder import openai_messages
from rft.ranges import PositiveInt
from rft.remote.http_client import ServerClient
from rft.remote.retry import BreakerOptions
from rft.reward.models.grade import Grade, about_one
from rft.reward.services.remote import Servers
from rft.reward.term import Term


@dataclass(frozen=True)
class ServedJudgeOptions:
    """The options of `ServedJudge`.

    Attributes:
        addresses: of the servers, with the version: http://host:8000/v1.
        model: its name on the servers.
        question: the question about a response, see `Question`.
        grade: how the text becomes a number, see `Grade`.
        system: message in front of the question, or null.
        max_new_tokens: of the judge's text.
        body: more fields of the request, such as those of the chat template.
        token: the name of the environment variable that holds the servers' API key, or null where they need none.
        breaker: when a server gets no requests.
    """

    addresses: list[str]
    model: str
    question: dict[str, Any]
    grade: dict[str, Any]
    system: str | None
    max_new_tokens: PositiveInt
    body: dict[str, Any]
    token: str | None
    breaker: BreakerOptions


class ServedJudge(Term):
    """Asks a served model about each response, at temperature 0, and reads its text with a regular expression.

    Args:
        key: supplied; the term's place in the yaml.
        options: of the yaml.

    Raises:
        ValueError: question, grade or addresses are malformed; names the key.
    """

    Options = ServedJudgeOptions
    awaits = True
    rows_per_call = 1

    def __init__(self, key: str, options: ServedJudgeOptions) -> None:
        self._key = key
        self._options = options
        self._servers = Servers(key, options.addresses, options.token, options.breaker)
        self._question = about_one(options.question, key)
        self._grade = Grade.of(options.grade, self._question.words, f"{key}.grade")
        self.reads = self._question.reads

    def check(self) -> None:
        """Checks that the servers have the model. Raises a ValueError that names the key and the cure."""
        for name, models in self._servers.ask_all(_models):
            if self._options.model not in models:
                raise ValueError(
                    f"{self._key}.model={self._options.model}: {name} serves {', '.join(models)}; name one of these"
                )

    async def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
        """The grade of one response. A `Failure` has one of the reasons of `Servers.post`."""
        (response,), (row,) = responses, rows
        options, question = self._options, self._question.ask(row, response=response)
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else openai_messages(question)
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        body = {"model": options.model, "temperature": 0.0, "max_tokens": options.max_new_tokens, **options.body}
        return await self._servers.post("/chat/completions", body | {"messages": [*system, *asked]}, self._read)

    def _read(self, answer: Any) -> list[float]:
        return [self._grade(verdict_text(answer))]


def verdict_text(answer: Any) -> str:
    """The judge's text in an answer of /chat/completions.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the answer is malformed.
    """
    text = answer["choices"][0]["message"]["content"]
    if not isinstance(text, str | None):
        raise ValueError(f"choices[0].message.content: {text!r:.40} is no text")
    return text or ""


async def _models(client: ServerClient) -> tuple[str, list[str]]:
    """The name of a server and the models that it has."""
    answer = await client.get("/models")
    with client.parse("the answer of /models"):
        return client.name, [str(model["id"]) for model in answer["data"]]
