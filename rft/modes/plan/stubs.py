"""What stands in for tokenizer, data, engine and rewards where only lengths matter: rows as long as they can be."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.packing.micro_batches import MicroBatch, MicroBatcher
from rft.algorithm.roles import POLICY
from rft.data.encode.encoder import Encoder
from rft.distributed import World
from rft.rollout.engine.base import Completion, Engine, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler
from rft.strategy.context import Context


class Vocabulary:
    """A tokenizer that knows how many tokens it has."""

    eos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def batch_decode(self, rows: Sequence[Any], **options: Any) -> list[str]:
        """No text for any row."""
        return [""] * len(rows)


class Texts(Encoder):
    """Encodes whatever it is given as so many tokens.

    Attributes:
        prompt, answer: their numbers of tokens.
    """

    def __init__(self, prompt: int, answer: int) -> None:
        self.prompt_tokens = prompt
        self.answer_tokens = answer

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """See `Encoder.prompts`."""
        return [[0] * self.prompt_tokens] * len(rows)

    def example(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """See `Encoder.example`."""
        trains = [False] * self.prompt_tokens + [True] * self.answer_tokens
        return [0] * len(trains), trains

    def steps(self, row: Mapping[str, Any], steps: Sequence[str], separator: str) -> tuple[list[int], list[int]]:
        """See `Encoder.steps`: one step."""
        tokens = self.prompt_tokens + self.answer_tokens
        return [0] * tokens, [tokens - 1]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """See `Encoder.encode`: one token each."""
        return [[0]] * len(texts)


class Absent(Engine):
    """In place of an engine that cannot be gone through: it takes the weights as they come and keeps none."""

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Never called: `StubSampler` answers."""
        raise AssertionError("an engine that is not there")

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Lets each go before the next one is gathered."""
        for _ in tensors:
            pass


@dataclass
class StubSampler(Sampler):
    """A sampler that answers at once.

    Attributes:
        texts: hold the number of tokens of an answer.
        own: the sampler that it stands in for, which takes the weights.
    """

    texts: Texts
    own: Sampler

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """See `Sampler.generate`."""
        most = min(self.texts.answer_tokens, sampling.max_new_tokens)

        def answer(sample: int, limit: int) -> Completion:
            tokens = min(limit, most)
            return Completion(
                [sample] * tokens, [0.0] * tokens, "length", "", [0] * tokens
            )  # no two of a prompt are alike

        return [
            [answer(sample, limit) for sample, limit in enumerate(request.limits or [most] * len(request.seeds))]
            for request in requests
        ]

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]], model: str = POLICY) -> None:
        """Hands the weights to the sampler that it stands in for."""
        self.own.publish(version, weights, model)

    def release(self) -> None:
        """See `Sampler.release`."""
        self.own.release()


def half_right(terms: Sequence[str]) -> Callable[[list[str], list[dict[str, Any]]], tuple[Tensor, dict[str, Tensor]]]:
    """A reward whose terms are 0 and 1 in turn, so that there is something to learn from every group."""

    def score(texts: list[str], rows: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        values = (torch.arange(len(texts)) % 2).float()
        return values, {term: values.clone() for term in terms}

    return score


@dataclass(frozen=True)
class FirstCuts(MicroBatcher):
    """The first few micro-batches alone: the fullest come first, and all of them take the same memory.

    Attributes:
        limit: how many.
    """

    limit: int = 1

    def micro_batches(
        self, batch: TensorDict, dummy: TensorDict, world: World, context: Context | None
    ) -> Iterator[MicroBatch]:
        """See `Cutting.micro_batches`."""
        for number, micro in enumerate(super().micro_batches(batch, dummy, world, context), start=1):
            yield replace(micro, last=True) if number == self.limit else micro
            if number == self.limit:
                return
