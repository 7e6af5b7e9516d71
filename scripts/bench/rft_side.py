"""The plugin of `step.yaml`: the engine that a user has, with the lengths of the workload, and the reward."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.workload import Lengths, score
from rft.reward import REWARDS
from rft.rollout.engine import Completion, Request, Sampling
from rft.rollout.hf import HFEngine


class ForcedLengths(HFEngine):
    """Ends each row at the length that the workload gives it and nowhere else: by the cap of its request.

    Args:
        model, tokenizer, max_rows: as in `HFEngine`.
        folder: of the workload.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_rows: int, folder: str) -> None:
        super().__init__(model, tokenizer, max_rows)
        self.ends = set()
        self._lengths = Lengths(Path(folder), tokenizer)

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Samples every request; evaluations, which are greedy and not what is measured, get one token."""
        forced = [
            replace(request, limits=[1] if sampling.temperature == 0 else self._lengths.of(request.prompt))
            for request in requests
        ]
        return super().generate(forced, sampling, progress)


@REWARDS.register("benchmark")
def benchmark(response: str, row: Mapping[str, Any]) -> float:
    """The reward of both sides."""
    return score(response)
