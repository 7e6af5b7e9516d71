"""Terms that servers compute: `remote`, and any term whose calls have the option `call.workers=http`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rft.batch.row_fields import PROMPT_OPENS
from rft.ranges import PositiveInt
from rft.remote.call_pool import BreakerOptions
from rft.remote.http_client import BadResponse, RequestRefused, ServerClient
from rft.reward.call import CallOptions, HostOptions
from rft.reward.function import build_term
from rft.reward.runners import LoopRunner, Runner
from rft.reward.services.protocol import (
    SCORE,
    Mapped,
    NemoGym,
    OpenRLHF,
    Protocol,
    Rft,
    check_json,
    check_servers,
    fingerprint,
    read_scores,
    score_body,
)
from rft.reward.services.servers import Servers
from rft.reward.term import Term
from rft.reward.thought import ReadingOptions


class RemoteTerm(Term):
    """Sends responses to servers and reads their scores.

    Args:
        key: supplied; the term's place in the yaml.
        addresses: of the servers, http://host:port each.
        protocol: what the servers speak, see `rft.reward.services.protocol`.
        term: with `rft`, the term of the servers; None: their sum.
        rows_per_request: most responses of a request.
        fields: of a row that are sent; None: all.
        path: of the requests; None: that of the protocol.
        request, score: with `mapping`, see `Mapped`; None otherwise.
        token: the name of the environment variable with the bearer token, or None.
        breaker: when a server gets no requests.

    Raises:
        ValueError: options do not fit each other, or an address is malformed; names the key.
    """

    awaits = True

    def __init__(
        self,
        key: str,
        addresses: list[str],
        protocol: Literal["rft", "openrlhf", "nemo_gym", "mapping"],
        term: str | None,
        rows_per_request: PositiveInt,
        fields: list[str] | None,
        path: str | None,
        request: dict[str, Any] | None,
        score: str | None,
        token: str | None,
        breaker: BreakerOptions,
    ) -> None:
        self._key = key
        self._servers = Servers(key, addresses, token, breaker)
        self._protocol = _protocol(key, protocol, term, request, score)
        self._term = term
        self._fields = fields
        self._path = path or self._protocol.path or ""
        if not self._path.startswith("/"):
            raise ValueError(f"{key}.path={path}: give the path of the requests, such as /score")
        if self._protocol.one_row and rows_per_request != 1:
            raise ValueError(
                f"{key}.rows_per_request={rows_per_request}: a request of protocol={protocol} has one response; set it "
                "to 1"
            )
        missing = [field for field in self._protocol.fields if fields is not None and field not in fields]
        if missing:
            raise ValueError(f"{key}.fields: the request needs the field {missing[0]!r}; add it")
        self.rows_per_call = rows_per_request
        self.reads = tuple(fields) if fields is not None else self._protocol.fields

    def check(self) -> None:
        """Asks the servers whether they can score."""
        if isinstance(self._protocol, Rft):
            rows = self.rows_per_call or 1
            self._protocol.fingerprint = check_servers(self._servers, self._key, self._term, rows)
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
        if self._fields is None:
            return dict(row)
        opens = {PROMPT_OPENS: row[PROMPT_OPENS]} if PROMPT_OPENS in row else {}
        return {field: row[field] for field in self._fields} | opens


def _protocol(key: str, name: str, term: str | None, request: dict[str, Any] | None, score: str | None) -> Protocol:
    """The protocol of a name; raises a ValueError for options that it does not read, or lacks."""
    if name != "rft" and term is not None:
        raise ValueError(f"{key}.term={term}: only servers of protocol=rft have terms; remove it")
    if name == "mapping":
        if request is None or score is None:
            missing = "request" if request is None else "score"
            raise ValueError(f"{key}.{missing} is null: protocol=mapping needs it, see docs/rewards.md")
        return Mapped(request, score)
    for option, value in (("request", request), ("score", score)):
        if value is not None:
            raise ValueError(f"{key}.{option}: only protocol=mapping reads it; remove it")
    return Rft(term) if name == "rft" else OpenRLHF() if name == "openrlhf" else NemoGym()


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
