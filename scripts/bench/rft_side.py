"""The plugin of `step.yaml`: the engine of a user with the response lengths of the workload, and the reward."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.workload import Lengths, score
from rft.reward import REWARDS
from rft.rollout.engine.base import Completion, EngineContext, OnCompletion, Request
from rft.rollout.engine.hf import HFEngine, HFOptions
from rft.rollout.engine.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class ForcedLengthsOptions(HFOptions):
    """Options of `ForcedLengths`.

    Attributes:
        workload: its folder.
    """

    workload: str


class ForcedLengths(HFEngine):
    """Ends each row at the length that the workload gives it and nowhere else: by the cap of its request.

    A step begins with sampling and ends with new weights; `cpu.json` holds the processor seconds of every step.
    """

    Options = ForcedLengthsOptions

    def __init__(self, options: ForcedLengthsOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        self.ends = []
        self._lengths = Lengths(Path(options.workload), context.tokenizer)
        self._file = Path(options.workload) / "cpu.json"
        self._began = 0.0
        self._cpu: list[float] = []

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Samples every request; evaluations, which are greedy and not measured, get one token."""
        self._began = time.process_time()
        forced = [
            replace(request, limits=[1] if sampling.temperature == 0 else self._lengths.of(request.prompt))
            for request in requests
        ]
        return super().generate(forced, sampling, on_completion)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights; the end of a step, unless it is the start of the run."""
        super().update_weights(version, tensors)
        if version > 0:
            self._cpu.append(time.process_time() - self._began)
            self._file.write_text(json.dumps(self._cpu))


@REWARDS.register("benchmark")
def benchmark(response: str, row: Mapping[str, Any]) -> float:
    """The reward of both sides."""
    return score(response)
