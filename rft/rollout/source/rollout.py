"""Batches of new text: draws prompts, samples groups of responses, scores them, redraws groups without signal."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.groups import informative_groups
from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import DatasetSource
from rft.data.rows.lazy import Rows
from rft.data.sampler import make_sampler
from rft.distributed import World
from rft.metrics import Metrics
from rft.rollout.engine.base import Completion, Engine, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.forced_stop import ForcedStop

Score = Callable[[list[str], list[dict[str, Any]]], tuple[Tensor, dict[str, Tensor]]]


@dataclass
class DynamicSampling:
    """Dynamic sampling (DAPO, 2503.14476): groups whose raw scores are all equal are drawn again.

    Attributes:
        term: the reward term that is looked at, before any shaping.
        between: groups whose mean of the term is outside [low, high] are drawn again too (PRIME, 2502.01456), or null.
        max_rounds: rounds of a step after which groups without signal fill the batch.
    """

    term: str
    between: list[float] | None
    max_rounds: int

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ValueError(f"algorithm.source.redraw.max_rounds={self.max_rounds}: set it to 1 or more")
        if self.between is not None and (len(self.between) != 2 or not 0 <= self.between[0] < self.between[1]):
            raise ValueError(
                f"algorithm.source.redraw.between={self.between}: expected [low, high] with 0 <= low < high, or null"
            )

    def keeps(self, raw: Tensor) -> bool:
        """True where a group has signal.

        Args:
            raw: the term of its rows, (N,).
        """
        low, high = self.between or (-math.inf, math.inf)
        inside = low <= float(raw.double().sum()) / len(raw) <= high
        return inside and bool(informative_groups(raw, torch.zeros(len(raw), dtype=torch.int64)).all())


class RolloutSource:
    """Samples a group of responses for each prompt and scores them.

    Args:
        world, engine, encoder, score, rows, prompts, group_size, sampling, seed, columns: supplied; `prompts` is the
            number of groups of a step over all ranks, `columns` what the method reads: where it reads `greedy_scores`,
            every prompt is answered once more, with the most likely tokens, and every row of its group gets that score.
        redraw: dynamic sampling, or null.
        interruption: answers that are too long are told to conclude, or null. Greedy answers, too: they are compared
            with the others.
    """

    writes: tuple[str, ...] = (*SOURCE_COLUMNS, "rollout_logprobs", "version", "scores", "terms")
    can_write: tuple[str, ...] = ("greedy_scores",)

    def __init__(
        self,
        world: World,
        engine: Engine,
        encoder: Encoder,
        score: Score,
        rows: Rows,
        prompts: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        columns: tuple[str, ...],
        redraw: DynamicSampling | None,
        interruption: ForcedStop | None,
    ) -> None:
        self.temperature = sampling.temperature
        self._world = world
        self._engine = engine
        self._encoder = encoder
        self._score = score
        self._rows = rows
        self._prompts = prompts
        self._group_size = group_size
        self._sampling = sampling
        wants_greedy = "greedy_scores" in columns
        self._greedy = replace(sampling, temperature=0.0, first_token=None) if wants_greedy else None
        self._seed = seed
        self._redraw = redraw
        self._interruption = interruption
        self._phrase = [] if interruption is None else encoder.encode([interruption.phrase])[0]
        self._mine = slice(world.rank, None, world.size)  # this rank's share of what all of them draw
        self._rows_sampler = make_sampler(rows, seed)
        self._surplus: list[list[dict[str, Any]]] = []

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        return ("prompt",)

    @staticmethod
    def given(options: dict[str, Any]) -> type[DatasetSource] | None:
        """The class that draws the texts alone that are not sampled, with some of the options; None without any."""
        return None

    def samples(self) -> bool:
        """See `Source.samples`."""
        return True

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step: whole groups, all of one prompt on one rank."""
        groups = self._draw_until_full(self._redraw, metrics) if self._redraw else self._draw(metrics)
        return collate([row for group in groups for row in group])

    def _draw(self, metrics: Metrics) -> list[list[dict[str, Any]]]:
        """One round: this rank's share of the next prompts, as scored groups."""
        return self._answer(self._rows_sampler.take(self._prompts)[self._mine], metrics)

    def _answer(self, mine: list[tuple[int, int]], metrics: Metrics) -> list[list[dict[str, Any]]]:
        """Scored groups of these (position, row) pairs."""
        rows = [self._rows[row] for _, row in mine]
        prompts = self._encoder.prompts(rows)
        requests = [
            Request(prompt, [row_seed(self._seed, position, sample) for sample in range(self._group_size)])
            for prompt, (position, _) in zip(prompts, mine, strict=True)
        ]
        completions, scores, terms = self._sample(requests, rows, self._sampling, metrics)
        if self._interruption is not None:
            interrupted = [len(completion.given) > 0 for group in completions for completion in group]
            metrics.mean("rollout/interrupted", torch.tensor(interrupted))
        shared: list[dict[str, Any]] = [{"group": position} for position, _ in mine]
        if self._greedy is not None:
            _, greedy, _ = self._sample([Request(prompt, [0]) for prompt in prompts], rows, self._greedy, metrics)
            metrics.mean("rollout/greedy_score", greedy)
            shared = [columns | {"greedy_scores": score} for columns, score in zip(shared, greedy, strict=True)]
        groups = []
        for number, (prompt, columns) in enumerate(zip(prompts, shared, strict=True)):
            group = []
            for sample, completion in enumerate(completions[number]):
                place = number * self._group_size + sample
                group.append(
                    rollout_row(prompt, completion, rows[number])
                    | columns
                    | {
                        "unit": columns["group"] * self._group_size + sample,
                        "scores": scores[place],
                        "terms": {name: values[place] for name, values in terms.items()},
                    }
                )
            groups.append(group)
        return groups

    def _sample(
        self, requests: list[Request], rows: list[dict[str, Any]], sampling: Sampling, metrics: Metrics
    ) -> tuple[list[list[Completion]], Tensor, dict[str, Tensor]]:
        """Completions per request, and of all of them in order the scores (B,) and the terms, (B,) each."""
        with metrics.timer("rollout"):
            if self._interruption is None:
                completions = self._engine.generate(requests, sampling, None)
            else:
                completions = self._interruption.generate(self._engine, requests, sampling, self._phrase)
        texts = [completion.text for group in completions for completion in group]
        fields = [row for row, group in zip(rows, completions, strict=True) for _ in group]
        with metrics.timer("reward"):
            scores, terms = self._score(texts, fields)
        return completions, scores, terms

    def _draw_until_full(self, redraw: DynamicSampling, metrics: Metrics) -> list[list[dict[str, Any]]]:
        """Rounds until all ranks together hold enough groups with signal; what is left over waits for the next step."""
        good: list[list[dict[str, Any]]] = self._surplus
        spare: list[list[dict[str, Any]]] = []
        for round_number in range(1, redraw.max_rounds + 1):
            if self._total(len(good)) >= self._prompts:
                break
            for group in self._draw(metrics):
                informative = redraw.keeps(torch.stack([row["terms"][redraw.term] for row in group]))
                (good if informative else spare).append(group)
            metrics.largest("rollout/rounds", round_number)
        found = self._total(len(good))
        metrics.add("rollout/informative", min(found, self._prompts) / self._prompts, 1.0)
        if found < self._prompts:
            logging.getLogger(__name__).warning(
                "dynamic sampling found %d of %d groups with signal in %r in algorithm.source.redraw.max_rounds=%d "
                "rounds; groups without signal fill the batch",
                found, self._prompts, redraw.term, redraw.max_rounds,
            )  # fmt: skip
        good, spare = self._everyones(good), self._everyones(spare)
        chosen = good[: self._prompts] + spare[: max(0, self._prompts - found)]
        # Who finds signal is chance: groups move between ranks.
        self._surplus = good[self._prompts :][self._mine]
        return chosen[self._mine]

    def _everyones(self, groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """The groups of all ranks in the order in which they were drawn."""
        return sorted((group for theirs in self._world.gather(groups) for group in theirs), key=_position)

    def _total(self, number: int) -> int:
        return sum(self._world.gather(number))

    def state_dict(self) -> dict[str, Any]:
        """Where in the data this source is, and the groups that wait for the next step."""
        return self._rows_sampler.state_dict() | {"surplus": self._surplus}

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes up the states of all ranks of the run that wrote them, on any number of ranks."""
        self._rows_sampler.load_state_dict(states[0])
        surplus = sorted((group for state in states for group in state["surplus"]), key=_position)
        self._surplus = surplus[self._mine]


def _position(group: list[dict[str, Any]]) -> int:
    return int(group[0]["group"])


def rollout_row(prompt: list[int], completion: Completion, row: dict[str, Any]) -> dict[str, Any]:
    """The batch row of one sampled response."""
    ids = torch.tensor(prompt + completion.tokens)
    start = len(prompt)
    trains = torch.zeros(len(ids), dtype=torch.bool)
    trains[start:] = True
    trains[start + completion.given.start : start + completion.given.stop] = False
    logprobs = torch.zeros(len(ids))
    logprobs[start:] = torch.tensor(completion.logprobs)
    version = torch.zeros_like(ids)
    version[start:] = torch.tensor(completion.versions)
    return {
        "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "response_mask": trains,
        "truncated": completion.finish_reason == "length",
        "rollout_logprobs": logprobs,
        "version": version,
        "fields": row | {"text": completion.text, "finish_reason": completion.finish_reason},
    }
