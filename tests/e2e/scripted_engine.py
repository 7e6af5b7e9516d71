"""An engine that answers from a table, so that the numbers of an evaluation are known."""

from collections.abc import Callable, Iterable

from torch import Tensor

from rft.rollout.engine.base import Completion, Engine, EngineContext, Request
from rft.rollout.engine.sampling import Sampling


class ScriptedEngine(Engine):
    """Answers a prompt with the text of the one key that the prompt contains.

    Args:
        answers: {part of a prompt: response}.
    """

    def __init__(self, context: EngineContext, answers: dict[str, str]) -> None:
        self.tokenizer = context.tokenizer
        self.answers = answers

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            pass

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        return [[self.answer(request)] * len(request.seeds) for request in requests]

    def answer(self, request: Request) -> Completion:
        prompt = self.tokenizer.decode(request.prompt)
        [text] = [text for part, text in self.answers.items() if part in prompt]
        tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        return Completion(tokens, [0.0] * len(tokens), "stop", text, [0] * len(tokens))
