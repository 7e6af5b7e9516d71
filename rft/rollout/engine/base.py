"""The protocol of a rollout engine: prompts and seeds in, sampled tokens with their log-probabilities out.

An engine knows nothing of rows, rewards or text templates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.forward.logits import forbidden_tokens
from rft.actor.lora.base import Lora
from rft.batch.encoded import MediaFacts
from rft.distributed import World
from rft.rollout.engine.sampling import Sampling
from rft.strategy.gather import WHOLE, GatherOptions

# What becomes of a request that runs while new weights arrive. recompute: its keys and values are computed again by the
# new weights, and it continues. abort: its tokens come back, and are continued as a prompt.
WhileUpdating = Literal["recompute", "abort"]


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of its samples.

    Attributes:
        prompt: token ids, at least one; an `EncodedText` has media.
        seeds: one 64-bit seed per sample; a sample is a function of prompt, seed, sampling and weights alone.
        limits: caps on new tokens, one per sample; None: `Sampling.max_new_tokens` alone caps them.
        order: where several calls of `generate` run at a time, requests of a lower order are sampled first.
    """

    prompt: list[int]
    seeds: list[int]
    limits: list[int] | None = None
    order: int = -1

    def limit(self, sample: int, sampling: "Sampling") -> int:
        """The cap on new tokens of a sample."""
        most = sampling.max_new_tokens if self.limits is None else min(sampling.max_new_tokens, self.limits[sample])
        assert most > 0, "a sample has at least one token"
        return most


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        tokens: sampled ids, including a sampled end token and the tokens of a stop string; the engine adds none.
        logprobs: log-probability of each token under the distribution that it was drawn from, after temperature and
            truncation; for greedy tokens under the plain softmax of the logits. NaN where the engine
            does not report it.
        finish_reason: `stop` at an end token or a stop string, `length` at the cap.
        text: the tokens decoded without special tokens, cut before the stop string.
        versions: of the weights that sampled each token.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    text: str
    versions: list[int]


@dataclass(frozen=True)
class Begun:
    """A sample of a group that has not ended, for a run that continues from a checkpoint.

    Attributes:
        order: of its request.
        identity: of the sample: equal where prompt, seed, cap and temperature are.
        tokens, logprobs, versions: as in `Completion`.
        finish_reason: as in `Completion`; None where the sample is not complete.
    """

    order: int
    identity: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length"] | None


OnCompletion = Callable[[int, int, Completion], None]  # the number of the request, that of the sample, the completion


@dataclass(frozen=True)
class EngineFacts:
    """What is true of every engine of a class.

    Attributes:
        samples: it can sample. False is for the engine of runs that sample nothing.
        takes_arguments: `rollout.engine_args` reach the engine. Where they do not, the run refuses them.
        plain_torch: `generate` and `update_weights` run ordinary torch operations in this process and nothing else, so
            they also run on tensors without storage. `mode=plan` counts the memory of such an engine.
        takes_media: it samples from prompts with media.
        has_processor: it expands the slots of media by a processor of its own, from `EncodedText.raw`.
        masks_padding: where a processor pads media, its model leaves out the padding.
        most_forbidden: the largest number of ids that a request may exclude; None for any.
        concurrent: several threads may call `generate` at a time, also while `update_weights` runs.
        servers: `mode=serve` starts servers of the same kind for other runs, see `ServersEngine.server_api`.
    """

    samples: bool = True
    takes_arguments: bool = False
    plain_torch: bool = False
    takes_media: bool = False
    has_processor: bool = False
    masks_padding: bool = True
    most_forbidden: int | None = None
    concurrent: bool = False
    servers: bool = False


@dataclass(frozen=True)
class EngineContext:
    """What a run gives to every engine.

    Attributes:
        world: the processes of the run. Every rank builds an engine of its own.
        model: the policy's model without weights (parameters on the meta device, or empty). An engine may fill it, or
            read config and names from it.
        tokenizer: of the policy.
        folder: of the run; all ranks can read and write it.
        engine_args: `rollout.engine_args` of the config.
        lora: `actor.lora` of the config, or None.
        dtype: in which the trainer computes.
        media: of the policy's processor; None for a model of text.
        device_type: of the devices of the run, if they are not those of this process (`mode=plan`).
        while_updating: what becomes of requests that run during `update_weights`; None: none run.
    """

    world: World
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    engine_args: dict[str, Any]
    lora: Lora | None
    dtype: torch.dtype
    media: MediaFacts | None = None
    device_type: str | None = None
    while_updating: WhileUpdating | None = None

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The ids that the engine must not sample; see `forbidden_tokens`."""
        return forbidden_tokens(len(self.model.get_output_embeddings().weight), self.tokenizer, self.media)


@dataclass(frozen=True)
class EngineCheckContext:
    """What an engine checks its options against, before a model is loaded.

    Attributes:
        engine_args: `rollout.engine_args` of the config.
        lora: `actor.lora` of the config, or None.
        media: whether the policy has a processor.
        device: of the strategy: cpu, cuda or auto.
        sampling: how training samples.
        while_updating: see `EngineContext`.
    """

    engine_args: dict[str, Any]
    lora: Lora | None
    media: bool
    device: str
    sampling: Sampling
    while_updating: WhileUpdating | None = None


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine, and what follows from them before one is built."""

    def check(self, context: EngineCheckContext) -> None:
        """Checks the options against the run, before a model is loaded.

        Raises:
            ValueError: the engine does not support them; names the key and the cure.
        """

    def check_model(self, config: PreTrainedConfig) -> None:
        """Checks that the engine can run the policy, before its weights are read.

        Args:
            config: of the policy.

        Raises:
            ValueError: it cannot; names the key and the cure.
        """

    def check_here(self) -> None:
        """Checks that this machine has what the engine needs. `mode=plan`, which may run elsewhere, does not call it.

        Raises:
            ValueError: a package or a program is missing; names the key and the cure.
        """

    def compute_dtype(self, engine_args: dict[str, Any], trainer: str) -> str:
        """The name of the dtype in which the engine computes.

        Args:
            engine_args: `rollout.engine_args` of the config.
            trainer: the name of the dtype in which the trainer computes.
        """
        return str(engine_args.get("dtype", trainer))

    def unread(self) -> dict[str, str]:
        """The keys below `rollout` that an engine with these options does not read, and why."""
        return {}


class Engine(ABC):
    """Samples tokens with weights that it is given.

    A class that implements this can be named in `rollout.engine._target_`. The other keys of `rollout.engine` are the
    fields of the dataclass that it names as its `Options`. A subclass must write `generate` and `update_weights`. All
    other methods have a default.

    The calls come in this order: `wake("weights")`, `update_weights`, `wake("kv_cache")`, any number of `generate`,
    `sleep`, and again from the start. `close` comes last. All ranks make the same calls, but for the arguments of
    `generate`.

    Args:
        options: of the yaml.
        context: of the run.

    Attributes:
        Options: the dataclass of the options.
        options, context: as given.
        facts: what is true of every engine of the class.
        gather_options: how `update_weights` takes the weights of a sharded model; by default whole, as they are, on
            every rank.
    """

    Options: ClassVar[type[EngineOptions]] = EngineOptions
    facts: ClassVar[EngineFacts] = EngineFacts()
    gather_options: GatherOptions = WHOLE
    context: EngineContext

    def __init__(self, options: Any, context: Any) -> None:
        self.options = options
        self.context = context

    @classmethod
    def check_sampling(cls, sampling: Sampling, logprobs: bool) -> None:
        """Checks that the engine can draw like this, before a model is loaded.

        Args:
            sampling: how training samples, or how an evaluation does.
            logprobs: whether the log-probabilities of the samples are read.

        Raises:
            ValueError: it cannot; the message begins with the option (`top_p=0.9: ...`), without its node.
        """

    @abstractmethod
    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Samples every request of this rank.

        Args:
            requests: prompts; the number of samples may differ between them.
            sampling: the same for all of them.
            on_completion: called once for each completion when it is finished, in any order and from any thread, one
                call at a time.

        Returns:
            The completions of each request, in the order of its seeds.
        """

    @abstractmethod
    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights. A collective: the tensors may be gathered while they are read.

        Args:
            version: the version of every token sampled from now on.
            tensors: names and tensors as in the state dict of the transformers model. It may be a generator, and must
                be read to its end. A tensor may be the trainer's own: an engine that keeps it without a copy sees it
                change.
        """

    def sleep(self) -> None:
        """Frees the memory that the engine does not need while the trainer works. It may drop its weights."""

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocates memory again: first for new weights, and once they are in for keys and values."""

    def abort(self) -> None:
        """Stops sampling that runs outside `generate`, or in other threads, whose `generate` raises an OSError then."""

    def begun(self) -> list[Begun]:
        """What is known of samples of each order that has not `ended`, for a run that continues from a checkpoint."""
        return []

    def continue_from(self, begun: list[Begun]) -> None:
        """Hands over what an earlier run knew of samples, which are continued where they are asked for again."""

    def ended(self, order: int) -> None:
        """The samples of this order are complete and scored, so that `begun` need not know of them. Any thread."""

    def health(self) -> dict[str, float]:
        """Numbers about the engine since the last call, logged as `engine/<name>`.

        Raises:
            RuntimeError: the engine is lost; names it.
        """
        return {}

    def close(self) -> None:
        """Ends the processes that the engine has started and frees what it has allocated."""


def row_seed(seed: int, position: int, sample: int) -> int:
    """The seed of one sample: a function of the run's seed, the position of its prompt and the number of the sample."""
    mixed = seed
    for number in (position, sample):
        mixed = (mixed * 6364136223846793005 + number * 2 + 1442695040888963407) % 2**63
        mixed ^= mixed >> 29
    return mixed
