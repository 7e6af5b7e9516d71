"""What one kind of server is told over HTTP: how it is started, asked for samples, and given weights."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from rft.remote.http_client import ServerClient
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.weight_broadcast import Channel, Make
from rft.rollout.server.weight_store import WeightVersion

LOCAL = "127.0.0.1"  # where the servers of a run listen that it has started


class Call(NamedTuple):
    """A POST: path and JSON body."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Sampled:
    """One sample as a server tells it.

    Attributes:
        tokens, logprobs, finish_reason: as in `Completion`.
        version: of the weights, as the answer says; None: they are none of ours.

    Raises:
        ValueError: this is no sample.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    version: int | None

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.logprobs)} log-probabilities")
        if not all(-math.inf < number <= 1e-3 for number in self.logprobs):
            raise ValueError("log-probabilities that are none")
        if self.finish_reason not in ("stop", "length"):
            raise ValueError(f"finish reason {self.finish_reason!r}")


class Aborted(ValueError):
    """The server ended a sample before its time, because it was told to."""


class ServerApi(Protocol):
    """One kind of server. Every awaited call raises `RequestFailed` where the answer is not a success; the caller sets
    the deadline.

    Attributes:
        rollout: the option of the group rollout that samples with such servers.
    """

    rollout: str

    def check(self, sampling: Sampling) -> None:
        """Raises a ValueError that names rollout.<key> for sampling that these servers cannot do, or whose
        log-probabilities they do not report as `Completion` wants them."""
        ...

    def command(self, python: str, model: Path, port: int, host: str = LOCAL) -> tuple[list[str], dict[str, str]]:
        """How a server is started.

        Args:
            python: the interpreter whose environment holds the package.
            model: a folder with config, tokenizer and generation config, but no weights: they come with `load`.
            port, host: where it listens.

        Returns:
            The command line, and what is added to the environment.
        """
        ...

    def request(self, prompt: list[int], seed: int, limit: int, ends: list[int], sampling: Sampling) -> Call:
        """What asks for one sample of at most `limit` new tokens, which ends with any of the tokens `ends`."""
        ...

    def parse(self, answer: Any) -> Sampled:
        """The sample in an answer. May raise KeyError, IndexError, TypeError and ValueError: the answer is garbage.

        Raises:
            Aborted: the sample was ended before its time.
        """
        ...

    async def healthy(self, peer: ServerClient) -> None:
        """Returns where the server is up."""
        ...

    async def version(self, peer: ServerClient) -> int | None:
        """Of the weights that it serves; None: they are none of ours."""
        ...

    async def join(self, peer: ServerClient, make: Make) -> Channel:
        """Brings its workers and rank zero together.

        Args:
            make: from the kinds of the workers' devices, cpu or cuda.
        """
        ...

    async def sleep(self, peer: ServerClient) -> None:
        """Ends what runs, and gives the memory of weights, keys and values back. Until `load` has waked it, `version`
        answers None. May be called again after a failure at any point."""
        ...

    async def load(
        self, peer: ServerClient, weights: WeightVersion, before: WeightVersion | None, channel: Channel | None
    ) -> None:
        """Takes weights in place of all it had, and serves them under their version: ends what runs, loads, drops
        cached prefixes, stamps, goes on. A server that sleeps takes memory for weights first, and for keys and values
        once they are in. May be called again after a failure at any point. `version` must not answer with the new one
        before the new weights are in.

        Args:
            before: what it serves, None where that is not known.
            channel: that tensors come through; None: they are read from their folder.
        """
        ...


def flags(arguments: dict[str, Any], off: str | None) -> Iterator[str]:
    """The words of a command line: a switch for true, words for a list, JSON for what is nested, nothing for null.

    Args:
        off: what comes before the name of a switch that is false; None where there are no such switches.
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


def stamped(label: str) -> int | None:
    """The version that weights are labelled with; None for a label that is none of ours."""
    return int(label) if label.isdecimal() else None


def check_memory(peer: ServerClient, device: str, prepared: bool, flag: str) -> None:
    """Raises Garbage where a server cannot give memory back; one on a CPU goes through the motions."""
    if device != "cpu" and not prepared:
        raise peer.bad_response(f"it cannot sleep: start it with {flag}, or set rollout.engine.servers.sleep=false")


def check_type(peer: ServerClient, dtype: torch.dtype, computes: str) -> None:
    """Raises Garbage where a server computes in another type than the one that its weights were rounded to."""
    rounded, theirs = (str(name).removeprefix("torch.") for name in (dtype, computes))
    if theirs != rounded:
        raise peer.bad_response(
            f"it computes in {theirs}, and the weights are rounded to {rounded}: start it with --dtype {rounded}, or "
            "set rollout.engine.servers.dtype=null"
        )
