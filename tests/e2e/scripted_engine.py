"""An engine that answers from a table, so that the numbers of an evaluation are known."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from rft.rollout.engine.base import Completion, Engine, EngineOptions, Request
from rft.rollout.engine.sampling import Sampling


@dataclass(frozen=True)
class ScriptedOptions(EngineOptions):
    """Options of `ScriptedEngine`.

    Attributes:
        answers: {part of a prompt: response}.
    """

    answers: dict[str, str]


class ScriptedEngine(Engine):
    """Answers a prompt with the text of the one key that the prompt contains."""

    Options = ScriptedOptions

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            pass

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        return [[self.answer(request)] * len(request.seeds) for request in requests]

    def answer(self, request: Request) -> Completion:
        tokenizer = self.context.tokenizer
        prompt = tokenizer.decode(request.prompt)
        [text] = [text for part, text in self.options.answers.items() if part in prompt]
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        return Completion(tokens, [0.0] * len(tokens), "stop", text, [0] * len(tokens))
