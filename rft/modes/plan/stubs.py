"""Stubs of the tokenizer, the encoder, the engine and the reward: all rows have the maximal length."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rft.batch.encoded import EncodedText
from rft.batch.scores import Scores, Scoring, ScoringAtEnd
from rft.batch.thoughts import PromptThoughts
from rft.data.encode.encoder import Encoder, Example
from rft.data.encode.tokenizer import UnknownCharacters
from rft.data.encode.truncation import Overlong
from rft.rollout.engine.base import Completion, Engine, EngineOptions, OnCompletion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import EngineSampler
from rft.strategy.gather import GatherOptions


class StubTokenizer:
    """A tokenizer with a number of tokens and no text.

    Args:
        size: number of tokens.
    """

    eos_token_id = pad_token_id = bos_token_id = 0
    is_fast = True
    unk_token_id = None
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def get_vocab(self) -> dict[str, int]:
        """The ids by their numbers."""
        return {str(number): number for number in range(self._size)}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """An empty text."""
        return ""

    def batch_decode(self, rows: Sequence[Any], **options: Any) -> list[str]:
        """An empty text for each row."""
        return [""] * len(rows)


class StubEncoder(Encoder):
    """Encodes every prompt and every answer as the same number of tokens.

    Attributes:
        prompt_tokens, answer_tokens: the lengths.
    """

    def __init__(self, prompt: int, answer: int) -> None:
        self.processor = None
        self.thoughts, self.unknown = PromptThoughts(StubTokenizer(1)), UnknownCharacters(StubTokenizer(1))
        self.end, self.ends = 0, (0,)
        self.prompt_tokens = prompt
        self.answer_tokens = answer

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[EncodedText]:
        return [EncodedText([0] * self.prompt_tokens)] * len(rows)

    def weighted_example(self, row: Mapping[str, Any], overlong: Overlong | None = None) -> Example:
        weights = [0.0] * self.prompt_tokens + [1.0] * self.answer_tokens
        return EncodedText([0] * len(weights)), weights

    def steps(self, row: Mapping[str, Any], steps: Sequence[str], separator: str) -> tuple[EncodedText, list[int]]:
        """One step, of all tokens."""
        tokens = self.prompt_tokens + self.answer_tokens
        return EncodedText([0] * tokens), [tokens - 1]

    def encode(self, texts: list[str]) -> list[EncodedText]:
        """One token for each text."""
        return [EncodedText([0])] * len(texts)


class StubEngine(Engine):
    """Replaces an engine that does not run on tensors of this process: reads the weights and keeps none.

    Args:
        gather_options: of that engine.
    """

    def __init__(self, gather_options: GatherOptions) -> None:
        super().__init__(EngineOptions(), None)
        self.gather_options = gather_options

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Never called: `StubSampler` returns the answers."""
        raise AssertionError("a stub samples nothing")

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Frees each tensor before the next one is taken."""
        for _ in tensors:
            pass


class StubSampler(EngineSampler):
    """A sampler that returns answers without sampling.

    Args:
        engine: receives the weights.
        encoder: holds the length of an answer.
    """

    def __init__(self, engine: Engine, encoder: StubEncoder) -> None:
        super().__init__(engine)
        self.encoder = encoder

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        most = min(self.encoder.answer_tokens, sampling.max_new_tokens)

        def answer(sample: int, limit: int) -> Completion:
            tokens = min(limit, most)
            # no two answers of a prompt are equal
            return Completion([sample] * tokens, [0.0] * tokens, "length", "", [0] * tokens)

        return [
            [answer(sample, limit) for sample, limit in enumerate(request.limits or [most] * len(request.seeds))]
            for request in requests
        ]


def stub_scoring(terms: Sequence[str]) -> Callable[[], Scoring]:
    """A reward whose terms alternate between 0 and 1, so that every group has an advantage.

    Args:
        terms: names of the reward terms.
    """

    def score(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        values = (torch.arange(len(texts)) % 2).float()
        return Scores.plain(values, {term: values.clone() for term in terms})

    return lambda: ScoringAtEnd(score)
