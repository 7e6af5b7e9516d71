"""The HTTP interface of one kind of server: command line, sampling requests, weight updates."""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from rft.actor.forward.logits import FORBIDDEN
from rft.batch.encoded import MediaFacts, as_encoded
from rft.data.encode.media.files import lossless_url
from rft.remote.http_client import ServerClient
from rft.remote.json_values import are_numbers, are_tokens
from rft.remote.server_process import LOCAL
from rft.remote.server_requests import Call
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server import remote
from rft.rollout.server.options import Servers
from rft.rollout.server.remote.rft_server_key import KEY_VARIABLE
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion

REMOTE = str(Path(remote.__file__).parent)


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt for servers, which expand its media by a processor of their own.

    Attributes:
        ids: token ids; with media those before the processor expands them.
        media: data: URLs by type, in the order of their slots; empty for a prompt of text.
    """

    ids: list[int]
    media: Mapping[str, list[str]] = field(default_factory=dict)


def server_prompt(prompt: list[int]) -> ServerPrompt:
    """A prompt of a request. Its media are encoded without loss.

    Args:
        prompt: token ids; an `EncodedText` with media has its raw form.
    """
    raw = as_encoded(prompt).raw
    if raw is None:
        return ServerPrompt(list(prompt))
    media = {kind: [lossless_url(medium, raw.sampling_rate) for medium in opened] for kind, opened in raw.media.items()}
    return ServerPrompt(list(raw.ids), media)


@dataclass(frozen=True)
class Sampled:
    """One sample as a server returns it.

    Attributes:
        tokens, logprobs: as in `Completion`.
        finish_reason: as in `Completion`; `abort` where the server has aborted the sample, which may have no token.
        versions: of the weights that sampled each token, as the response states it; None for weights that this run did
            not send.
        prompt: the token ids behind which the server has sampled, where the prompt has media; otherwise None.
        parts: how many requests have sampled it.

    Raises:
        ValueError: the fields do not make a sample.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    versions: list[int | None]
    prompt: list[int] | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        aborted, length = self.finish_reason == "abort", len(self.tokens)
        if not (length or aborted) or (length, length) != (len(self.logprobs), len(self.versions)):
            raise ValueError(
                f"{length} tokens with {len(self.logprobs)} log-probabilities and {len(self.versions)} versions"
            )
        if not are_tokens(self.tokens) or not are_tokens(self.prompt or ()):
            raise ValueError("ids that are not those of tokens")
        if not are_numbers(self.logprobs) or not all(-math.inf < number <= 1e-3 for number in self.logprobs):
            raise ValueError("numbers that are not log-probabilities")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(f"finish reason {self.finish_reason!r}")

    def joined(self, rest: "Sampled") -> "Sampled":
        """The sample that begins with this one, and what was sampled behind it."""
        return replace(
            rest,
            tokens=self.tokens + rest.tokens,
            logprobs=self.logprobs + rest.logprobs,
            versions=self.versions + rest.versions,
            parts=self.parts + rest.parts,
        )


class Aborted(ValueError):
    """The server aborted a sample, as a weight update makes it do."""


class ServerApi(ABC):
    """One kind of server. Every awaited call raises `RequestFailed` where the server does not report success; the
    caller sets the deadline.

    Args:
        engine_args: `rollout.engine_args`, the flags of a server that the run starts: `max_model_len: 2048` is
            `--max-model-len 2048`.
        media: of the policy's processor; None for a model of text.
        forbidden: ids that the servers never sample; see `forbidden_tokens`.

    Attributes:
        rollout: the option of the group `rollout` that samples with such servers.
        reserved: the arguments that the run itself sets.
        recomputes: `load` leaves running requests; their keys and values are computed again with the new weights.
            Otherwise it aborts them.

    Raises:
        ValueError: `engine_args` has a reserved argument; names it.
    """

    rollout: ClassVar[str]
    reserved: ClassVar[frozenset[str]]
    recomputes = False

    def __init__(
        self, engine_args: dict[str, Any], media: MediaFacts | None = None, forbidden: Sequence[int] = ()
    ) -> None:
        if reserved := sorted(self.reserved & engine_args.keys()):
            raise ValueError(f"rollout.engine_args.{reserved[0]}: the run itself sets this argument; take it out")
        self._engine_args = engine_args
        self._media = media
        self._forbidden = dict.fromkeys(forbidden, FORBIDDEN)

    @abstractmethod
    def check(self, sampling: Sampling) -> None:
        """Raises a ValueError that begins with the option for sampling options that these servers lack."""

    def unknown_logprobs(self, sampling: Sampling) -> str:
        """A message that begins with the option if the servers do not report log-probabilities as `Completion` defines
        them; empty if they do."""
        return ""

    @abstractmethod
    def command(
        self, python: str, model: Path, port: int, host: str = LOCAL, load_format: str = "dummy"
    ) -> tuple[list[str], dict[str, str]]:
        """How to start a server.

        Args:
            python: the interpreter whose environment has the package.
            model: a folder with config, tokenizer and generation config.
            port, host: where the server listens.
            load_format: "dummy": the weights come with `load`; "auto": the server reads those of the folder.

        Returns:
            The command line, and variables to add to the environment.
        """

    @abstractmethod
    def request(self, prompt: ServerPrompt, seed: int, limit: int, ends: list[int], sampling: Sampling) -> Call:
        """The POST for one sample of at most `limit` new tokens that ends with any of the tokens `ends`. Of a prompt
        with media the response must have `Sampled.prompt`."""

    @abstractmethod
    def parse(self, answer: Any) -> Sampled:
        """The sample in a response.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the response is malformed.
            Aborted: the server aborted the sample, and its tokens are lost.
        """

    @abstractmethod
    async def healthy(self, client: ServerClient) -> None:
        """Returns if the server is up."""

    @abstractmethod
    async def version(self, client: ServerClient) -> int | None:
        """The version of the weights that the server serves; None for weights that this run did not send."""

    @abstractmethod
    async def hold(self, client: ServerClient) -> None:
        """Lets requests wait until `load` has sent weights to a server that has dummy ones. May be repeated."""

    @abstractmethod
    async def transport(self, client: ServerClient, options: Servers, device: torch.device) -> WeightTransport:
        """Chooses how the server gets weights; the caller opens it.

        Args:
            options: of the servers.
            device: of rank 0.
        """

    @abstractmethod
    async def sleep(self, client: ServerClient) -> None:
        """Aborts running requests and releases the memory of weights, keys and values. Until `load` has woken the
        server, `version` returns None. May be repeated after a failure at any point."""

    @abstractmethod
    async def load(
        self, client: ServerClient, weights: WeightVersion, before: WeightVersion | None, transport: WeightTransport
    ) -> None:
        """Replaces the weights of the server: aborts or holds running requests (see `recomputes`), loads, drops cached
        prefixes, sets the version, resumes. A sleeping server allocates memory for weights first, and for keys and
        values after the weights are loaded. May be repeated after a failure at any point. `version` must not return the
        new version before the new weights are loaded.

        Args:
            before: what the server serves, None where that is unknown.
            transport: to the server, open.
        """


def flags(arguments: dict[str, Any], off: str | None) -> Iterator[str]:
    """The words of a command line: a switch for true, words for a list, JSON for a dict, nothing for None.

    Args:
        off: the prefix of a switch that is false; None where the command has no such switches.
    """
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False:
            yield from [] if off is None else [f"--{off}{flag}"]
        elif value is not None:
            yield f"--{flag}"
            if isinstance(value, list):
                yield from map(str, value)
            elif value is not True:
                yield json.dumps(value) if isinstance(value, dict) else str(value)


def python_path() -> str:
    """PYTHONPATH of a server, so that it finds the modules of `remote`."""
    return os.pathsep.join(filter(None, (REMOTE, os.environ.get("PYTHONPATH"))))


def key_environment(key: str | None) -> dict[str, str]:
    """The variables that give a server its key; None: it needs none."""
    return {} if key is None else {KEY_VARIABLE: key}


def labelled_version(label: str) -> int | None:
    """The version in the label of a server's weights; None for a label that this run did not set."""
    return int(label) if label.isdecimal() else None


def check_memory(client: ServerClient, device: str, prepared: bool, flag: str) -> None:
    """Raises `BadResponse` where a server on a GPU was not started with what it needs to release memory.

    Args:
        device: of the server; on a CPU the sleep calls succeed without it.
        prepared: it was started with `flag`.
    """
    if device != "cpu" and not prepared:
        raise client.bad_response(f"it cannot sleep: start it with {flag}, or set rollout.engine.servers.sleep=false")


def check_dtype(client: ServerClient, dtype: torch.dtype, computes: str) -> None:
    """Raises `BadResponse` where a server computes in another dtype than its weights were rounded to."""
    rounded, served = (str(name).removeprefix("torch.") for name in (dtype, computes))
    if served != rounded:
        raise client.bad_response(
            f"it computes in {served}, and the weights are rounded to {rounded}: start it with --dtype {rounded}, or "
            "set rollout.engine.servers.dtype=null"
        )
