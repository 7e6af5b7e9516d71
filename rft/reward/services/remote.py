"""Servers of rewards, and the terms that they compute: `remote`, and any term with `call.workers=http`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from rft.batch.row_fields import PROMPT_OPENS
from rft.errors import did_you_mean
from rft.ranges import PositiveInt
from rft.remote.call_pool import CallPool, CircuitOpen
from rft.remote.http_client import (
    PROBE_S,
    BadResponse,
    RequestFailed,
    RequestRefused,
    ServerClient,
    bearer,
    key_named,
)
from rft.remote.retry import BreakerOptions
from rft.reward.async_runners import LoopRunner
from rft.reward.build import build_term
from rft.reward.call import CallOptions, HostOptions
from rft.reward.runners import Runner
from rft.reward.services.protocol import (
    HEALTH,
    SCORE,
    Mapped,
    NemoGym,
    OpenRLHF,
    Protocol,
    Rft,
    check_json,
    fingerprint,
    read_scores,
    score_body,
)
from rft.reward.term import Failure, Term
from rft.reward.thought import ReadingOptions

T = TypeVar("T")
REASONS = ((CircuitOpen, "circuit_open"), (BadResponse, "bad_response"), (RequestRefused, "refused"))


class Servers:
    """Servers that compute the same values.

    Args:
        key: of the node in the yaml that has the addresses.
        addresses: http://host:port of each, with a path where their paths have a common beginning.
        token: the name of the environment variable with the bearer token, or None.
        breaker: when a server gets no requests.

    Raises:
        ValueError: there is no address, or one is malformed; names the key.
    """

    def __init__(self, key: str, addresses: Sequence[str], token: str | None, breaker: BreakerOptions) -> None:
        if not addresses:
            raise ValueError(f"{key}.addresses is empty: give the address of a server, such as http://host:8000")
        for number, address in enumerate(addresses):
            ServerClient(f"{key}.addresses[{number}]", address)
        self._key = key
        self._addresses = addresses
        self._token = token
        self._breaker = breaker
        self._pool: CallPool | None = None  # made with the first call, since it needs the token

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T | Failure:
        """What `read` makes of the answer to a POST, or the `Failure` of the last server; see `CallPool.post`.

        Its reason is `unreachable`, `refused`, `bad_response` or `circuit_open`.
        """
        if self._pool is None:
            self._pool = CallPool(self._clients(), self._breaker)
        try:
            return await self._pool.post(path, body, read)
        except RequestFailed as error:
            reason = next((name for kind, name in REASONS if isinstance(error, kind)), "unreachable")
            return Failure(reason, str(error), error, repeatable=error.transient)

    def ask_all(self, ask: Callable[[ServerClient], Awaitable[T]]) -> list[T]:
        """Asks every server once, before the run.

        Args:
            ask: sends the request and reads the answer.

        Returns:
            What the servers that answer return, in order.

        Raises:
            ValueError: the token is missing, no server answers, or one refuses the token; names the key and the cure.
        """
        replies = asyncio.run(self._ask_all(ask))
        for error in replies:
            if isinstance(error, RequestRefused) and error.unauthorized:
                token = self._token or "null"
                raise ValueError(f"{self._key}.token={token}: {error}; name the variable with the server's token")
        answers = [answer for answer in replies if not isinstance(answer, OSError)]
        if not answers:
            raise ValueError(f"{replies[0]}; no server of {self._key}.addresses answers: start one, or correct them")
        return answers

    async def _ask_all(self, ask: Callable[[ServerClient], Awaitable[T]]) -> list[T | OSError]:
        async def one(client: ServerClient) -> T | OSError:
            try:
                async with asyncio.timeout(PROBE_S):
                    return await ask(client)
            except TimeoutError:
                return TimeoutError(f"{client.name}: no answer within {PROBE_S:g} s")
            except OSError as error:
                return error

        return await asyncio.gather(*map(one, self._clients()))

    def _clients(self) -> list[ServerClient]:
        headers = bearer(key_named(self._token, self._key))
        return [
            ServerClient(f"{self._key}.addresses[{number}]={address}", address, headers, use_proxies=True)
            for number, address in enumerate(self._addresses)
        ]


def check_servers(servers: Servers, key: str, term: str | None, rows: int) -> str:
    """Asks the servers whether they can score, before the run.

    Args:
        servers: of the term.
        key: of its node in the yaml.
        term: whose values are needed; None: the sum.
        rows: responses of a request.

    Returns:
        The fingerprint of the term, or of the sum.

    Raises:
        ValueError: no server answers, one cannot score these requests, or two differ; names the key and the cure.
    """
    healths = servers.ask_all(_health)
    for health in healths:
        terms = health["terms"]
        if term is not None and term not in terms:
            there = f"{health['name']} has no term {term!r}, but {', '.join(terms)}{did_you_mean(term, terms)}"
            raise ValueError(f"{key}.addresses: {there}; start it with this term, or name another")
        if rows > health["rows"]:
            raise ValueError(
                f"{key}.rows_per_request={rows}: {health['name']} takes {health['rows']}; set it to that, or raise "
                "serve.limits.rows of the server"
            )
    prints = [health["sum"] if term is None else health["terms"][term] for health in healths]
    if other := [health["name"] for health, mark in zip(healths, prints, strict=True) if mark != prints[0]]:
        raise ValueError(
            f"{key}.addresses: {healths[0]['name']} and {other[0]} have other options; start them with the same"
        )
    return str(prints[0])


async def _health(client: ServerClient) -> dict[str, Any]:
    answer = await client.get(HEALTH)
    with client.parse(f"the answer of {HEALTH}"):
        terms, rows = dict(answer["terms"]), int(answer["rows"])
        return {"name": client.name, "terms": terms, "sum": answer["sum"], "rows": rows}


@dataclass(frozen=True)
class RemoteOptions:
    """The options of `RemoteTerm`.

    Attributes:
        addresses: of the servers, http://host:port each.
        protocol: what the servers speak, see `rft.reward.services.protocol`.
        term: with `rft`, the term of the servers; None: their sum.
        rows_per_request: most responses of a request.
        fields: of a row that are sent; None: all.
        path: of the requests; None: that of the protocol.
        request, score: with `mapping`, see `Mapped`; None otherwise.
        token: the name of the environment variable with the bearer token, or None.
        breaker: when a server gets no requests.
    """

    addresses: list[str]
    protocol: Literal["rft", "openrlhf", "nemo_gym", "mapping"]
    term: str | None
    rows_per_request: PositiveInt
    fields: list[str] | None
    path: str | None
    request: dict[str, Any] | None
    score: str | None
    token: str | None
    breaker: BreakerOptions

    def protocol_of(self, key: str) -> Protocol:
        """The protocol of the servers.

        Args:
            key: of the term in the yaml.

        Raises:
            ValueError: it does not read one of the options, or lacks one; names the key.
        """
        name = self.protocol
        if name != "rft" and self.term is not None:
            raise ValueError(f"{key}.term={self.term}: only servers of protocol=rft have terms; remove it")
        if name == "mapping":
            if self.request is None or self.score is None:
                missing = "request" if self.request is None else "score"
                raise ValueError(f"{key}.{missing} is null: protocol=mapping needs it, see docs/rewards.md")
            return Mapped(self.request, self.score)
        for option, value in (("request", self.request), ("score", self.score)):
            if value is not None:
                raise ValueError(f"{key}.{option}: only protocol=mapping reads it; remove it")
        return Rft(self.term) if name == "rft" else OpenRLHF() if name == "openrlhf" else NemoGym()


class RemoteTerm(Term):
    """Sends responses to servers and reads their scores.

    Args:
        key: supplied; the term's place in the yaml.
        options: of the yaml.

    Raises:
        ValueError: options do not fit each other, or an address is malformed; names the key.
    """

    Options = RemoteOptions
    awaits = True

    def __init__(self, key: str, options: RemoteOptions) -> None:
        self._key = key
        self._options = options
        self._servers = Servers(key, options.addresses, options.token, options.breaker)
        self._protocol = options.protocol_of(key)
        self._path = options.path or self._protocol.path or ""
        fields, rows = options.fields, options.rows_per_request
        if not self._path.startswith("/"):
            raise ValueError(f"{key}.path={options.path}: give the path of the requests, such as /score")
        if self._protocol.one_row and rows != 1:
            raise ValueError(
                f"{key}.rows_per_request={rows}: a request of protocol={options.protocol} has one response; set it to 1"
            )
        missing = [field for field in self._protocol.fields if fields is not None and field not in fields]
        if missing:
            raise ValueError(f"{key}.fields: the request needs the field {missing[0]!r}; add it")
        self.rows_per_call = rows
        self.reads = tuple(fields) if fields is not None else self._protocol.fields

    def check(self) -> None:
        """Asks the servers whether they can score."""
        if isinstance(self._protocol, Rft):
            term, rows = self._options.term, self._options.rows_per_request
            self._protocol.fingerprint = check_servers(self._servers, self._key, term, rows)
        else:
            self._servers.ask_all(_answers)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that the fields that are sent are JSON."""
        check_json(self._sent(row), f"name those that the server needs in {self._key}.fields")

    async def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
        """The values that a server gives. A `Failure` has one of the reasons of `Servers.post`."""
        body = self._protocol.body(responses, [self._sent(row) for row in rows])
        read = self._protocol.read
        return await self._servers.post(self._path, body, lambda answer: read(body, answer, len(responses)))

    def _sent(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are sent, and `prompt_opens` of a row that has it: the server may read the thoughts."""
        if (fields := self._options.fields) is None:
            return dict(row)
        opens = {PROMPT_OPENS: row[PROMPT_OPENS]} if PROMPT_OPENS in row else {}
        return {field: row[field] for field in fields} | opens


async def _answers(client: ServerClient) -> None:
    """Passes if a server answers at all: other protocols have no request that asks what a server can do."""
    try:
        await client.get("/")
    except BadResponse:
        return
    except RequestRefused as error:
        if error.status in (401, 403):
            raise


class HostedTerm(Term):
    """Computes the values of a term on servers that have the same term.

    Args:
        own: the term in this process; it checks rows and extracts answers.
        name: of the term, here and on the servers.
        node: of the term in the yaml, with the options of its thoughts; the servers must have the same.
        key: of the options in the yaml.
        options: of the servers.
    """

    awaits = True

    def __init__(self, own: Term, name: str, node: Mapping[str, Any], key: str, options: HostOptions) -> None:
        self.state_as(own)
        self._own = own
        self._name = name
        self._key = key
        self._fingerprint = fingerprint(node)
        self._servers = Servers(key, options.addresses, options.token, options.breaker)
        self.rows_per_call = options.rows_per_request

    def check(self) -> None:
        """Checks that the servers have this term with the same options."""
        if check_servers(self._servers, self._key, self._name, self.rows_per_call or 1) != self._fingerprint:
            raise ValueError(
                f"{self._key}.addresses: the servers have other options of the term {self._name!r}; start them with "
                "those of this run, or correct them here"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks the row, and that it is JSON: the whole row is sent."""
        self._own.check_row(row)
        check_json(row, f"remove it from the rows, or compute the term {self._name!r} without servers")

    def extract(self, response: str) -> str | None:
        return self._own.extract(response)

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
        return self._own.gold_responses(row)

    async def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
        """The values that the servers give. A `Failure` has one of the reasons of `Servers.post`."""
        body = score_body(responses, rows, self._name)
        return await self._servers.post(SCORE, body, lambda answer: read_scores(body, answer, self._fingerprint))


def hosted(
    name: str, node: Mapping[str, Any], key: str, options: CallOptions, reading: ReadingOptions
) -> tuple[Term, Runner]:
    """A term that servers compute, and the event loop of its requests. Arguments as in `rft.reward.call.build`."""
    term = HostedTerm(build_term(node, key), name, {**node, **asdict(reading)}, f"{key}.call.http", options.http)
    return term, LoopRunner(term, name, options.concurrency, options.deadline_s)
