"""What may be the cause of a gap, tried one after another: the trainer scores the batch as the engine may have."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.modes.doctor.report import DoctorReport, Gap
from rft.strategy.base import DTYPES

TOLERANCE = {"float32": 1e-4, "float16": 0.06, "bfloat16": 0.5}  # nats, of the worst token
TEMPERATURES = (1.0, 0.6, 0.7, 0.8, 0.9)  # what an engine may take in place of rollout.temperature

ALIKE = 3.0  # rounding in other places makes gaps that differ by less than this factor


@dataclass(frozen=True)
class Suspicion:
    """A cause that was tried.

    Attributes:
        kind: what is suspected.
        trial: how the trainer scored.
        gap: what it is then.
        allowed: the largest gap that there may be if this is the cause; None where the trial cannot take the gap away,
            only show how large it would be.
        cure: what it means, and what to change.
    """

    kind: str
    trial: str
    gap: Gap
    allowed: float | None
    cure: str

    def explains(self, gap: Gap) -> bool:
        """True where it takes the gap away, or is as large."""
        if self.allowed is None:
            return self.gap.mean / ALIKE <= gap.mean <= self.gap.mean * ALIKE
        return self.gap.largest <= self.allowed and self.gap.mean <= gap.mean / 2


@dataclass(frozen=True)
class Suspect:
    """A batch whose gap is too large.

    Attributes:
        batch: this rank's rows.
        logprobs: of the trainer, (B, T).
        score: the trainer's log-probabilities of a batch at a temperature, in a dtype of that name.
        temperature, dtype: of the trainer.
        begin: the tokenizer's begin token, or None.
    """

    batch: TensorDict
    logprobs: Tensor
    score: Callable[[TensorDict, float, str], Tensor]
    temperature: float
    dtype: str
    begin: int | None

    def tried(self, chart: DoctorReport, gather: Callable[[float], list[float]]) -> list[Suspicion]:
        """Tries everything and notes it in the chart."""
        return [*self._temperature(chart), *self._template(chart), *self._rounding(chart, gather), *self._dtype(chart)]

    def _temperature(self, chart: DoctorReport) -> Iterator[Suspicion]:
        asked, allowed = self.temperature, TOLERANCE[self.dtype]
        for other in dict.fromkeys((asked**2, *TEMPERATURES)):
            if other != asked:
                trial = f"the trainer at temperature {other:g}"
                gap = chart.note(trial, self.batch, self.score(self.batch, other, self.dtype))
                cure = (
                    f"the engine samples at temperature {other:g}, not at rollout.temperature={asked:g}: set "
                    f"rollout.temperature={other:g}, or choose a rollout that heeds it"
                )
                yield Suspicion("temperature", trial, gap, allowed, cure)

    def _template(self, chart: DoctorReport) -> Iterator[Suspicion]:
        for trial, batch, does in self._edits():
            gap = chart.note(trial, batch, self.score(batch, self.temperature, self.dtype))
            cure = f"the engine {does}: it is to take tokens as they are sent; see rollout.engine and data.template"
            yield Suspicion("template", trial, gap, TOLERANCE[self.dtype], cure)

    def _edits(self) -> Iterator[tuple[str, TensorDict, str]]:
        """What an engine may make of prompts: how it is called, the batch with it, what the engine does."""
        doubled = self.batch.apply(lambda column: torch.cat([column[:, :1], column], 1) if column.dim() > 1 else column)
        yield "prompts with their first token twice", doubled, "reads the first token of a prompt twice"
        if self.begin is not None:
            begun = doubled.clone()
            begun["tokens", "input_ids"][:, 0] = self.begin
            yield "prompts behind a begin token", begun, "puts a begin token in front of a prompt"
        without = self.batch.apply(lambda column: column[:, 1:].clone() if column.dim() > 1 else column)
        without["keep"][:, 0] = False
        yield "prompts without their first token", without, "leaves out the first token of a prompt"

    def _rounding(self, chart: DoctorReport, gather: Callable[[float], list[float]]) -> Iterator[Suspicion]:
        said = self.batch["rollout_logprobs"][self.batch["keep"]]
        for name in ("bfloat16", "float16"):
            dtype = DTYPES[name]
            if all(gather(bool((said.to(dtype).float() == said).all()))):
                trial = f"the trainer rounded to {name}"
                gap = chart.note(trial, self.batch, self.logprobs.to(dtype).float())
                allowed = torch.finfo(dtype).eps * max(gather(float(said.abs().max())))
                cure = f"the engine rounds its log-probabilities to {name}: set rollout.engine_args so that it does not"
                yield Suspicion("rounding", trial, gap, allowed, cure)

    def _dtype(self, chart: DoctorReport) -> Iterator[Suspicion]:
        for name in (name for name in DTYPES if name != self.dtype):
            coarser = TOLERANCE[name] > TOLERANCE[self.dtype]
            trial = f"the trainer in {name}{' against itself' if coarser else ''}"
            said = self.batch.clone().set("rollout_logprobs", self.logprobs) if coarser else self.batch
            gap = chart.note(trial, said, self.score(self.batch, self.temperature, name))
            cure = (
                f"the engine computes in {name}, the trainer in strategy.dtype={self.dtype}: set "
                f"rollout.engine_args.dtype={self.dtype} or strategy.dtype={name}"
            )
            yield Suspicion("dtype", trial, gap, None if coarser else TOLERANCE[self.dtype], cure)
