"""Requests for the load balancer: one sample, or the log-probabilities of a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.requests import Call
from rft.rollout.server.prompt_logprobs import PromptLogprobs, Text, TokenLogprobs
from rft.rollout.server.server_api import Sampled, ServerApi


@dataclass(frozen=True)
class SampleRequest:
    """Requests one sample; see `ServerRequest`.

    Attributes:
        post: what every server gets.
        limit: most new tokens.
        server_api: of the servers.
        version: of the weights; a sample of another version is discarded.
    """

    post: Call
    limit: int
    server_api: ServerApi
    version: int

    def call(self, client: ServerClient) -> Call:
        return self.post

    def read(self, client: ServerClient, answer: Any) -> Sampled:
        sampled = self.server_api.parse(answer)
        length = len(sampled.tokens)
        if length > self.limit or (sampled.finish_reason == "length" and length < self.limit):
            found = f"{sampled.finish_reason} after {length} of {self.limit} tokens"
            raise ValueError(f"{found}: are prompt and answer longer than rollout.engine_args allows?")
        if sampled.version != self.version:
            raise RequestFailed(f"{client.name} serves version {sampled.version}, not {self.version}")
        return sampled


@dataclass(frozen=True)
class LogprobRequest:
    """Requests the log-probabilities of the tokens of a text; see `ServerRequest`.

    Attributes:
        text: the text, as tokens.
        count: most likely tokens to report at each position.
        apis: the kind of each server.
    """

    text: Text
    count: int
    apis: Mapping[ServerClient, PromptLogprobs]

    def call(self, client: ServerClient) -> Call:
        return self.apis[client].call(self.text, self.count)

    def read(self, client: ServerClient, answer: Any) -> TokenLogprobs:
        return self.apis[client].read(answer, self.text, self.count)
