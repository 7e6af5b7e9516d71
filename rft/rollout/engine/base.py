"""The protocol of a rollout engine: prompts and seeds in, sampled tokens with their log-probabilities out.

An engine knows nothing of rows, rewards or text templates. Whoever implements `Engine` can be named in a yaml; a
subclass writes `generate` and `update_weights`, and whatever else it has something to do for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from rft.rollout.engine.sampling import Sampling

if TYPE_CHECKING:
    from rft.rollout.server.server_api import ServerApi


@dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted of it.

    Attributes:
        prompt: token ids, at least one.
        seeds: one 64-bit seed a sample; a sample is a function of prompt, seed, sampling and weights alone.
        limits: caps on new tokens, one a sample, below `Sampling.max_new_tokens`; None for no others.
    """

    prompt: list[int]
    seeds: list[int]
    limits: list[int] | None = None

    def limit(self, sample: int, sampling: "Sampling") -> int:
        """The cap on new tokens of a sample."""
        most = sampling.max_new_tokens if self.limits is None else min(sampling.max_new_tokens, self.limits[sample])
        assert most > 0, "a sample has at least one token"
        return most


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        tokens: sampled ids, with the end token or the tokens of the stop string where one was sampled; an engine adds
            none.
        logprobs: log-probability of each token under the distribution that it was drawn from, after temperature and
            truncation; for greedy tokens under the plain softmax of the logits.
        finish_reason: `stop` at an end token or a stop string, `length` at the cap.
        text: the tokens decoded without special tokens, cut before the stop string.
        versions: of the weights that sampled each token.
        given: places in `tokens` of what was put in and not sampled; the log-probability there is 0.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    text: str
    versions: list[int]
    given: range = range(0)


class Engine(ABC):
    """What the rollout source asks of an engine.

    Attributes:
        rehearses: whether mode=plan can go through it without numbers, to see what it takes.
    """

    rehearses: bool = False

    @staticmethod
    def check(options: dict[str, Any], sampling: Sampling) -> None:
        """Refuses what it cannot do before a model is loaded.

        Args:
            options: of the engine in the yaml, `engine_args`, and `lora`, what `actor.lora` says.

        Raises:
            ValueError: names the key and the cure.
        """

    @staticmethod
    def check_here(options: dict[str, Any]) -> None:
        """Refuses where what it needs is not on this machine. A plan, for another machine, does not ask.

        Args:
            options: of the engine in the yaml.

        Raises:
            ValueError: names the key and the cure.
        """

    @staticmethod
    def server_api(engine_args: dict[str, Any]) -> "ServerApi":
        """What mode=serve tells the servers that it starts.

        Raises:
            ValueError: there are no servers of its kind.
        """
        raise ValueError(
            "mode=serve: this rollout samples in the process that trains; choose rollout=vllm_server or rollout=sglang"
        )

    @abstractmethod
    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None
    ) -> list[list[Completion]]:
        """Samples every request.

        Args:
            requests: prompts; each may want another number of samples.
            sampling: the same for all of them.
            progress: called with the number of completions finished so far, whenever it has grown.

        Returns:
            Completions per request, in the order of its seeds.
        """

    @abstractmethod
    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights, named as in the state dict of the HF model; every weight must come.

        Args:
            version: what completions sampled from now on are stamped with.
            tensors: may be a generator; a tensor may be kept without a copy and then follows its owner's changes.
        """

    def sleep(self) -> None:
        """Gives back the memory that it can do without while the trainer works. It may forget its weights."""

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes memory again: for new weights first, and once they have come for keys and values."""

    def abort(self) -> None:
        """Stops whatever is being sampled outside `generate`, as when the run ends in the middle of it."""

    def health(self) -> dict[str, float]:
        """Numbers about the engine since they were last asked for, by their name.

        Raises:
            RuntimeError: the engine is lost; names it.
        """
        return {}

    def close(self) -> None:
        """Ends whatever it started."""


def row_seed(seed: int, position: int, sample: int) -> int:
    """A seed for one row that depends on nothing but its place in the run."""
    mixed = seed
    for number in (position, sample):
        mixed = (mixed * 6364136223846793005 + number * 2 + 1442695040888963407) % 2**63
        mixed ^= mixed >> 29
    return mixed
