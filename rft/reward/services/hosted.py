"""The values of a term that servers of `mode=serve` compute: `call.workers=http`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rft.reward.build import build_term
from rft.reward.call import CallOptions, HostOptions
from rft.reward.runners import LoopRunner, Runner
from rft.reward.services.protocol import SCORE, check_json, check_servers, fingerprint, read_scores, score_body
from rft.reward.services.servers import Servers
from rft.reward.term import Term
from rft.reward.thought import ReadingOptions


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
        self.reads, self.extracts, self.others = own.reads, own.extracts, own.others
        self.thoughts, self.opening, self.tool_calls = own.thoughts, own.opening, own.tool_calls
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
