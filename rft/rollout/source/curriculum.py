"""Batches of new text whose prompts are chosen by how often they are solved, which is tracked while training."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft.batch.collate import collate
from rft.batch.scores import is_scored
from rft.batch.trajectory import Trajectory, given_segments, to_row
from rft.data.base import CheckContext, SourceFacts
from rft.errors import Checks
from rft.metrics import Metrics
from rft.ranges import Fraction, PositiveFloat
from rft.rollout.source.base import RolloutContext
from rft.rollout.source.rollout import RolloutOptions, RolloutSource, check_term


class PromptRecord(NamedTuple):
    """The last answer to a prompt: nine bytes a token.

    Attributes:
        row: the prompt's.
        ids: prompt and response, (T,) int32.
        sampled: which of them the policy sampled, (T,) bool.
        logprobs: of those by the policy that sampled them, (L,) float32.
    """

    row: int
    ids: Tensor
    sampled: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Forget:
    """Old counts fade faster where the policy has changed more: 2^(-change / half) of them stays.

    Attributes:
        half: the change after which half of the counts stays: the mean absolute difference of a token's log-probability
            between then and now, over the response that was sampled at the last visit.
        least: the share that stays at least.
    """

    half: PositiveFloat
    least: Fraction


@dataclass(frozen=True)
class SolveRate:
    """The solve rate of a prompt, right / (right + wrong), as the mean of a Beta distribution.

    Attributes:
        term: the reward term that is tracked, between 0 and 1.
        right, wrong: counts before the first visit.
        keep: the share of the counts that a visit leaves at most, before its own are added.
        forget: leaves less where the policy has changed, or null.
    """

    term: str
    right: PositiveFloat
    wrong: PositiveFloat
    keep: Fraction
    forget: Forget | None

    def __post_init__(self) -> None:
        least = 0.0 if self.forget is None else self.forget.least
        if least > self.keep:
            raise ValueError(
                f"algorithm.source.tracking.keep={self.keep}: it must be at least forget.least={least}; raise it"
            )

    def share(self, change: float) -> float:
        """The share of the counts that stays at a visit, if the policy changed by `change` since the last one."""
        if self.forget is None:
            return self.keep
        return min(self.keep, max(self.forget.least, 2.0 ** (-change / self.forget.half)))


@dataclass(frozen=True)
class Priority:
    """A prompt of solve rate p is drawn with weight sqrt(p (1 - p)) + floor: most often where the outcome is open."""

    floor: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class CurriculumOptions(RolloutOptions):
    """Options of `CurriculumSource`.

    Attributes:
        tracking: how the solve rate is tracked.
        priority: how often a prompt is drawn; null for epochs.
        retire: prompts of at least this solve rate are not drawn again, or null (ScaleRL, 2510.13786).
    """

    tracking: SolveRate
    priority: Priority | None
    retire: Fraction | None

    def facts(self) -> SourceFacts:
        facts = super().facts()
        return replace(facts, writes=(*facts.writes, "baseline_scores"))

    def check(self, context: CheckContext) -> None:
        """Checks that the tracked term is a reward term, that all rows are known, and that nothing else orders them."""
        check = Checks()
        check.attempt(super().check, context)
        check.attempt(check_term, f"{context.key}.tracking", self.tracking.term, context)
        if context.mixture and self.priority is not None:
            check.messages.append(
                f"data.train is a mixture, and {context.key}.priority would draw its rows by other weights; set "
                f"{context.key}.priority=null, or train on one of its parts"
            )
        if not context.shuffle and self.priority is not None:
            check.messages.append(
                f"data.shuffle=false: {context.key}.priority draws rows by how often they are solved, in no order; set "
                f"{context.key}.priority=null, or data.shuffle=true"
            )
        if context.streaming is not None:
            check.messages.append(
                f"data.streaming={context.streaming}: {context.key}.tracking counts how often each row is solved, "
                "and the rows of a stream are not known; choose algorithm/source=rollout, or set data.streaming=null"
            )
        check.end()


class CurriculumSource(RolloutSource):
    """A rollout source that tracks how often each prompt is solved, and chooses prompts by it.

    Each row gets `baseline_scores`: the solve rate of its prompt as it was known before this visit. With
    `tracking.forget` the source also calls `context.logprobs`.
    """

    Options = CurriculumOptions
    options: CurriculumOptions

    def __init__(self, options: CurriculumOptions, context: RolloutContext) -> None:
        super().__init__(options, context)
        prior = torch.tensor([options.tracking.right, options.tracking.wrong]).double()
        self._counts = prior.repeat(len(context.rows), 1)  # (N, 2)
        self._visits: dict[int, PromptRecord] = {}

    def draw(self, metrics: Metrics) -> list[list[dict[str, Any]]]:
        rates = self._counts[:, 0] / self._counts.sum(1)  # (N,)
        take = self.row_sampler.take if self.options.priority is None else self.row_sampler.take_by_weight
        local = take(self.context.prompts, self._weights(rates, metrics))[self.context.share]
        groups = self.answer(local, metrics)
        metrics.mean("rollout/solve_rate", rates[[row for _, row in local]])
        for (_, row), group in zip(local, groups, strict=True):
            for answer in group:
                answer["baseline_scores"] = rates[row].float()
        self._update_counts(local, groups, metrics)
        return groups

    def _weights(self, rates: Tensor, metrics: Metrics) -> Tensor:
        """How often each prompt is to be drawn, (N,) float64."""
        priority, retire = self.options.priority, self.options.retire
        retired = torch.zeros_like(rates, dtype=torch.bool) if retire is None else rates >= retire
        metrics.mean("rollout/retired", retired)
        if retired.all():
            logging.getLogger(__name__).warning(
                "every prompt is solved at the rate of algorithm.source.retire=%s; all of them are drawn again",
                retire,
            )
            retired = torch.zeros_like(retired)
        weights = torch.ones_like(rates)
        if priority is not None:
            weights = (rates * (1 - rates)).sqrt() + priority.floor
        return torch.where(retired, 0.0, weights)

    def _update_counts(
        self, local: list[tuple[int, int]], groups: list[list[dict[str, Any]]], metrics: Metrics
    ) -> None:
        """Adds the outcome of a round to the counts. Every rank adds those of all ranks, ordered by position."""
        visits: dict[int, PromptRecord] = {}
        changes: dict[int, float] = {}
        tracking = self.options.tracking
        if tracking.forget is not None:
            visits, changes = self._compare(local, groups)
            metrics.mean("rollout/policy_change", torch.tensor(list(changes.values())))
        found = []
        for (position, row), group in zip(local, groups, strict=True):
            scores = torch.stack([answer["terms"][tracking.term] for answer in group]).double()
            scores = scores[is_scored(scores)]
            if len(scores) and not (scores.min() >= 0 and scores.max() <= 1):
                raise ValueError(
                    f"algorithm.source.tracking.term={tracking.term}: a solve rate is tracked of a term between "
                    f"0 and 1, and it was {float(scores.min())} to {float(scores.max())}; choose another term"
                )
            share = tracking.share(changes.get(row, 0.0)) if len(scores) else 1.0
            found.append((position, row, share, torch.stack([scores.sum(), (1 - scores).sum()])))
        parts = self.context.world.gather((found, visits))
        for _, row, share, counts in sorted((o for outcomes, _ in parts for o in outcomes), key=itemgetter(0)):
            self._counts[row] = share * self._counts[row] + counts
        latest = {position: visit for _, part in parts for position, visit in part.items()}
        self._visits |= {visit.row: visit for _, visit in sorted(latest.items())}

    def _compare(
        self, local: list[tuple[int, int]], groups: list[list[dict[str, Any]]]
    ) -> tuple[dict[int, PromptRecord], dict[int, float]]:
        """The records of these visits by position, and for each row the change of the policy since its last visit.

        The first answer stands for its group. The old policy is gone, but its log-probabilities of the old answer are
        kept.
        """
        before = [self._visits[row] for row in sorted({row for _, row in local}) if row in self._visits]
        answers = [(group[0]["tokens"]["input_ids"], group[0]["response_mask"]) for group in groups]
        current = self._logprobs([*answers, *((visit.ids.long(), visit.sampled) for visit in before)])
        visits = {
            position: PromptRecord(row, ids.int(), sampled, logprobs)
            for (position, row), (ids, sampled), logprobs in zip(local, answers, current, strict=False)
        }
        again = zip(before, current[len(local) :], strict=True)
        return visits, {visit.row: float((visit.logprobs - now).abs().mean()) for visit, now in again}

    def _logprobs(self, texts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The current policy's log-probabilities of the sampled tokens of each text (T,), (L,) each."""
        rows = []
        for unit, (ids, sampled) in enumerate(texts):
            text = Trajectory(given_segments(ids.tolist(), sampled.tolist()), None, {})
            rows.append(to_row(text, group=unit, unit=unit) | {"loss_mask": sampled})
        found = self.context.logprobs(collate(rows))  # (B, T)
        return [row[: len(sampled)][sampled] for row, (_, sampled) in zip(found, texts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Adds counts and visits, which are the same on every rank."""
        return super().state_dict() | {"counts": self._counts.clone(), "visits": _packed(self._visits.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._counts = state["counts"].clone()
        self._visits = {visit.row: visit for visit in _unpacked(state["visits"])}


def _packed(visits: Collection[PromptRecord]) -> dict[str, Tensor]:
    """Records behind one another, so that a checkpoint has few tensors."""
    lengths = torch.tensor([len(visit.ids) for visit in visits], dtype=torch.int64)
    rows = torch.tensor([visit.row for visit in visits], dtype=torch.int64)
    if not visits:
        return {"rows": rows, "lengths": lengths}
    ids, sampled, logprobs = (torch.cat(parts) for parts in list(zip(*visits, strict=True))[1:])
    return {"rows": rows, "lengths": lengths, "ids": ids, "sampled": sampled, "logprobs": logprobs}


def _unpacked(state: dict[str, Tensor]) -> list[PromptRecord]:
    """The records of `_packed`."""
    lengths = state["lengths"].tolist()
    if not lengths:
        return []
    sampled = state["sampled"].split(lengths)
    logprobs = state["logprobs"].split([int(mask.sum()) for mask in sampled])
    return [
        PromptRecord(*record)
        for record in zip(state["rows"].tolist(), state["ids"].split(lengths), sampled, logprobs, strict=True)
    ]
