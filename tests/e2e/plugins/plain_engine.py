"""An engine of one's own: without a cache, it reads the whole text again for every new token."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rft.rollout.engine.base import (
    Completion,
    Engine,
    EngineCheckContext,
    EngineContext,
    EngineOptions,
    OnCompletion,
    Request,
)
from rft.rollout.engine.sampling import Sampling


@dataclass(frozen=True)
class PlainOptions(EngineOptions):
    """Options of `PlainEngine`.

    Attributes:
        min_tokens: no text ends before it has so many tokens.
    """

    min_tokens: int

    def check(self, context: EngineCheckContext) -> None:
        sampling = context.sampling
        if sampling.truncates() or sampling.stop:
            raise ValueError("rollout: PlainEngine draws from the whole distribution; set no truncation and stop=[]")
        if self.min_tokens > sampling.max_new_tokens:
            raise ValueError(
                f"rollout.engine.min_tokens={self.min_tokens}: lower it to rollout.max_new_tokens or below"
            )


class PlainEngine(Engine):
    """Samples one text after another with the model of the run."""

    Options = PlainOptions

    def __init__(self, options: PlainOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        self.model = context.model.eval()
        self.version = 0

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_state_dict(dict(tensors), assign=True)
        self.version = version

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        found: list[list[Completion]] = []
        for number, request in enumerate(requests):
            limits = [request.limit(sample, sampling) for sample in range(len(request.seeds))]
            pairs = zip(request.seeds, limits, strict=True)
            found.append([self.complete(request.prompt, seed, limit, sampling.temperature) for seed, limit in pairs])
            if on_completion is not None:
                for sample, completion in enumerate(found[-1]):
                    on_completion(number, sample, completion)
        return found

    def complete(self, prompt: list[int], seed: int, limit: int, temperature: float) -> Completion:
        """One text; temperature 0 takes the most likely tokens, whose log-probabilities are those of temperature 1."""
        tokenizer = self.context.tokenizer
        generator = torch.Generator(self.model.device).manual_seed(seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        reason: Literal["stop", "length"] = "length"
        while len(tokens) < limit and reason == "length":
            ids = torch.tensor([prompt + tokens], device=self.model.device)  # (1, T)
            logits = self.model(input_ids=ids).logits[0, -1].float()  # (V,)
            if len(tokens) + 1 < self.options.min_tokens:
                logits[tokenizer.eos_token_id] = -torch.inf
            distribution = torch.log_softmax(logits / (temperature or 1.0), -1)  # (V,)
            draw = torch.multinomial(distribution.exp(), 1, generator=generator) if temperature else logits.argmax()
            tokens.append(int(draw))
            logprobs.append(float(distribution[tokens[-1]]))
            if tokens[-1] == tokenizer.eos_token_id:
                reason = "stop"
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens, logprobs, reason, text, [self.version] * len(tokens))
