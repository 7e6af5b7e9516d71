"""One sample of a server: its request, the check of the answer, and the request for what an abort left out."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.server_requests import Call, Continued
from rft.rollout.engine.base import Begun, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.server_api import Aborted, Sampled, ServerApi, ServerPrompt


@dataclass(frozen=True)
class SampleOptions:
    """What the samples of a call have in common.

    Attributes:
        server_api: of the servers.
        ends: end tokens.
        sampling: how tokens are drawn.
        oldest: the oldest version of the weights whose tokens are taken.
        newest: returns the newest one that a server can have by now.
        continues: an aborted sample is continued behind its tokens; otherwise it begins again.
        fields: of the body, beside those of `ServerApi.request`.
    """

    server_api: ServerApi
    ends: list[int]
    sampling: Sampling
    oldest: int
    newest: Callable[[], int]
    continues: bool = False
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleRequest:
    """Requests one sample; see `ServerRequest`.

    Attributes:
        prompt: of the sample.
        seed: of the sample. What follows an abort has another one: the same would repeat the random numbers of the
            first tokens.
        limit: most new tokens.
        options: see `SampleOptions`.
        begun: what servers have sampled of it already.
    """

    prompt: ServerPrompt
    seed: int
    limit: int
    options: SampleOptions
    begun: Sampled | None = None

    @property
    def complete(self) -> bool:
        """Nothing is left to sample."""
        return self.begun is not None and self.begun.finish_reason != "abort"

    @property
    def identity(self) -> str:
        """Equal where prompt, seed, cap and temperature are; `Begun.identity`."""
        prompt = zlib.crc32(repr(self.prompt.ids).encode())
        return f"{prompt}-{self.seed}-{self.limit}-{self.options.sampling.temperature}"

    def call(self, client: ServerClient) -> Call:
        prompt, seed, limit, sampling = self.prompt, self.seed, self.limit, self.options.sampling
        if self.begun is not None:
            given = self.begun.tokens
            prompt = replace(prompt, ids=[*prompt.ids, *given])
            seed, limit = row_seed(seed, 0, len(given)), limit - len(given)
            sampling = replace(sampling, first_token=None)
        call = self.options.server_api.request(prompt, seed, limit, self.options.ends, sampling)
        return Call(call.path, call.body | self.options.fields)

    def read(self, client: ServerClient, answer: Any) -> Sampled | Continued:
        options, part = self.options, self.options.server_api.parse(answer)
        if part.finish_reason == "abort" and not options.continues:
            raise Aborted("the sample was aborted")
        for version in part.versions:
            if version is None or not options.oldest <= version <= options.newest():
                wanted = str(options.oldest) if options.oldest == options.newest() else f"{options.oldest} or later"
                raise RequestFailed(f"{client.name} serves version {version}, not {wanted}")
        whole = part if self.begun is None else self.begun.joined(part)
        length = len(whole.tokens)
        if length > self.limit or (part.finish_reason == "length" and length < self.limit):
            ended = f"{part.finish_reason} after {length} of {self.limit} tokens"
            raise ValueError(f"{ended}: are prompt and answer longer than rollout.engine_args allows?")
        if part.finish_reason == "abort":
            return Continued(replace(self, begun=whole if whole.tokens else None))
        return whole


def as_begun(order: int, request: SampleRequest, known: Sampled) -> Begun:
    """What a checkpoint has of a sample.

    Args:
        order: of its request.
        known: all of the sample, or a part that an abort has ended.
    """
    reason = None if known.finish_reason == "abort" else known.finish_reason
    versions = [version for version in known.versions if version is not None]
    return Begun(order, request.identity, known.tokens, known.logprobs, versions, reason)


def as_sampled(known: Begun) -> Sampled:
    """What a checkpoint has of a sample, as a server returns it."""
    return Sampled(known.tokens, known.logprobs, known.finish_reason or "abort", [*known.versions])
