"""Tries possible causes of a gap one by one: the trainer computes the batch as the engine may have computed it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.divergence import TOLERANCE
from rft.batch.columns import kind_of
from rft.modes.doctor.report import DoctorReport, Gap
from rft.strategy.base import DTYPES

TEMPERATURES = (1.0, 0.6, 0.7, 0.8, 0.9)  # that an engine may use instead of rollout.temperature
ALIKE = 3.0  # gaps of equal size differ by less than this factor; rounding differs from operation to operation


@dataclass(frozen=True)
class Cause:
    """A cause that was tried.

    Attributes:
        kind: the kind of the cause, such as `temperature`.
        trial: how the trainer computed the log-probabilities.
        gap: the gap of the trial.
        allowed: the largest gap of the trial if this is the cause; None if the trial cannot remove the gap, and only
            shows how large a gap the cause would produce.
        cure: a message with the cause and what to change.
    """

    kind: str
    trial: str
    gap: Gap
    allowed: float | None
    cure: str

    def explains(self, gap: Gap) -> bool:
        """True if the trial removes the gap, or produces one of the same size."""
        if self.allowed is None:
            return self.gap.mean / ALIKE <= gap.mean <= self.gap.mean * ALIKE
        return self.gap.largest <= self.allowed and self.gap.mean <= gap.mean / 2


@dataclass(frozen=True)
class CauseSearch:
    """Looks for the cause of a gap on one batch.

    Attributes:
        batch: this rank's rows.
        logprobs: (B, T) log-probabilities of the trainer.
        score: computes the trainer's log-probabilities of a batch at a temperature, in the dtype of this name.
        plain: those of the batch, computed without the options of `rounds`.
        rounds: see `Strategy.rounding_options`.
        temperature, dtype: those of the trainer.
        begin: the tokenizer's BOS token, or None.
    """

    batch: TensorDict
    logprobs: Tensor
    score: Callable[[TensorDict, float, str], Tensor]
    plain: Callable[[TensorDict], Tensor]
    rounds: Mapping[str, Any]
    temperature: float
    dtype: str
    begin: int | None

    def run(self, report: DoctorReport, gather: Callable[[float], list[float]]) -> list[Cause]:
        """Tries every cause and adds its gap to the report.

        The models of another dtype do not have the options of `rounds` either, so they would show nothing of the dtype.

        Args:
            gather: collects one number from every rank.
        """
        return [
            *self._temperature(report),
            *self._template(report),
            *self._rounding(report, gather),
            *(self._options(report) if self.rounds else self._dtype(report)),
        ]

    def _temperature(self, report: DoctorReport) -> Iterator[Cause]:
        allowed = TOLERANCE[self.dtype]
        for other in dict.fromkeys((self.temperature**2, *TEMPERATURES)):
            if other != self.temperature:
                trial = f"the trainer at temperature {other:g}"
                gap = report.add_gap(trial, self.batch, self.score(self.batch, other, self.dtype))
                cure = (
                    f"the engine samples at temperature {other:g}, not at rollout.temperature={self.temperature:g}: "
                    f"set rollout.temperature={other:g}, or choose a rollout that supports it"
                )
                yield Cause("temperature", trial, gap, allowed, cure)

    def _template(self, report: DoctorReport) -> Iterator[Cause]:
        for trial, batch, does in self._edits():
            gap = report.add_gap(trial, batch, self.score(batch, self.temperature, self.dtype))
            cure = f"the engine {does}: it must use tokens as they are sent; see rollout.engine and data.template"
            yield Cause("template", trial, gap, TOLERANCE[self.dtype], cure)

    def _edits(self) -> Iterator[tuple[str, TensorDict, str]]:
        """Ways in which an engine may change prompts: the trial, the changed batch, what the engine does."""
        doubled = self._edit_tokens(lambda column: torch.cat([column[:, :1], column], 1))
        yield "prompts with their first token twice", doubled, "repeats the first token of a prompt"
        if self.begin is not None:
            with_begin = doubled.clone()
            with_begin["tokens", "input_ids"][:, 0] = self.begin
            yield "prompts with a BOS token in front", with_begin, "prepends a BOS token to a prompt"
        without = self._edit_tokens(lambda column: column[:, 1:].clone())
        without["loss_mask"][:, 0] = False
        yield "prompts without their first token", without, "drops the first token of a prompt"

    def _edit_tokens(self, edit: Callable[[Tensor], Tensor]) -> TensorDict:
        """The batch with every per-token column edited."""

        def apply(name: str | tuple[str, ...], column: Tensor) -> Tensor:
            outer = name if isinstance(name, str) else name[0]
            return edit(column) if kind_of(outer, column.dim()) == "token" else column

        return self.batch.named_apply(apply, nested_keys=True)

    def _rounding(self, report: DoctorReport, gather: Callable[[float], list[float]]) -> Iterator[Cause]:
        engine = self.batch["rollout_logprobs"][self.batch["loss_mask"]]
        for name in ("bfloat16", "float16"):
            dtype = DTYPES[name]
            if all(gather(bool((engine.to(dtype).float() == engine).all()))):
                trial = f"the trainer rounded to {name}"
                gap = report.add_gap(trial, self.batch, self.logprobs.to(dtype).float())
                allowed = torch.finfo(dtype).eps * max(gather(float(engine.abs().max())))
                cure = f"the engine rounds its log-probabilities to {name}: set rollout.engine_args so that it does not"
                yield Cause("rounding", trial, gap, allowed, cure)

    def _options(self, report: DoctorReport) -> Iterator[Cause]:
        named = " ".join(f"strategy.{name}={value}" for name, value in self.rounds.items())
        trial = f"the trainer without {named}"
        gap = report.add_gap(trial, self.batch, self.plain(self.batch))
        cure = (
            f"the trainer computes with {named}, and the engine does not: choose a correction of the gap "
            f"(algorithm/correction), or set {turned_off(self.rounds)}"
        )
        yield Cause("options", trial, gap, TOLERANCE[self.dtype], cure)

    def _dtype(self, report: DoctorReport) -> Iterator[Cause]:
        for name in (name for name in DTYPES if name != self.dtype):
            coarser = TOLERANCE[name] > TOLERANCE[self.dtype]
            trial = f"the trainer in {name}{' against itself' if coarser else ''}"
            batch = self.batch.clone().set("rollout_logprobs", self.logprobs) if coarser else self.batch
            gap = report.add_gap(trial, batch, self.score(self.batch, self.temperature, name))
            cure = (
                f"the engine computes in {name}, the trainer in strategy.dtype={self.dtype}: set "
                f"rollout.engine_args.dtype={self.dtype} or strategy.dtype={name}"
            )
            yield Cause("dtype", trial, gap, None if coarser else TOLERANCE[self.dtype], cure)


def turned_off(rounds: Mapping[str, Any]) -> str:
    """The options of `Strategy.rounding_options` as a command line that sets none of them."""
    return " ".join(f"strategy.{name}=null" for name in rounds)
