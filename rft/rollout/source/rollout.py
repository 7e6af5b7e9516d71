"""Batches of new text: draws prompts, samples groups of responses, scores them, replaces groups without signal."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.media import keep_once, share_again
from rft.batch.scores import Scores, is_scored
from rft.batch.trajectory import Trajectory, to_row, to_rows
from rft.batch.turn_columns import TURN_COLUMNS
from rft.data.base import CheckContext, Source, SourceFacts, SourceOptions
from rft.data.encode.encoder import Encoder
from rft.data.encode.parts import has_parts
from rft.errors import Checks, did_you_mean
from rft.imports import import_part
from rft.metrics import Metrics
from rft.ranges import PositiveInt
from rft.rollout.answerer import RowRequests
from rft.rollout.answers import log_episodes
from rft.rollout.engine.sampling import Sampling
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.source.base import RolloutContext

# A part, which a run with `algorithm.source.redraw` imports: its module and its function.
REDRAW = ("rft.rollout.source.dynamic_sampling", "draw_until_full")
NO_SIGNAL = "no signal"  # why dynamic sampling drops a group
AHEAD = ("rft.rollout.schedule.stream", "GroupStream")  # a part: that of runs with `rollout.staleness`
Group = list[dict[str, Any]]  # the rows of one prompt


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling (DAPO, 2503.14476): groups whose raw scores are all equal are dropped,
    and other prompts are drawn for them.

    Attributes:
        term: the reward term that decides, before any shaping.
        between: groups whose mean of the term is outside [low, high] are dropped too (PRIME, 2502.01456), or null.
        max_rounds: rounds of a step after which groups without signal fill the batch.
    """

    term: str
    between: tuple[float, float] | None
    max_rounds: PositiveInt

    def __post_init__(self) -> None:
        if self.between is not None and not 0 <= self.between[0] < self.between[1]:
            raise ValueError(
                f"algorithm.source.redraw.between={list(self.between)}: expected [low, high] with 0 <= low < high, "
                "or null"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(SourceOptions):
    """Options of `RolloutSource`.

    Attributes:
        redraw: dynamic sampling, or null.
        interruption: forced stop of answers that are too long, or null. It holds for greedy answers, too: they are
            compared with the others.
    """

    redraw: DynamicSampling | None
    interruption: ForcedStop | None

    def facts(self) -> SourceFacts:
        return SourceFacts(
            writes=(*SOURCE_COLUMNS, "rollout_logprobs", "version", "scores", "terms"),
            fields=("prompt",),
            sampled="always",
            writes_if_read=("greedy_scores",),
            scores=True,
            episodes=True,
        )

    def check(self, context: CheckContext) -> None:
        """Checks that dynamic sampling has a reward term of the run and groups of more than one response."""
        if self.redraw is None:
            return
        check = Checks()
        check.attempt(check_term, f"{context.key}.redraw", self.redraw.term, context)
        if context.group_size < 2:
            check.messages.append(
                f"algorithm.group_size={context.group_size}: a group of one never differs, so dynamic sampling "
                "would drop all of them; set algorithm.group_size to 2 or more, or algorithm/source=rollout"
            )
        check.end()

    def check_tokens(self, context: CheckContext, encoder: Encoder) -> None:
        """Checks that the phrase of a forced stop leaves room for an answer."""
        if (stop := self.interruption) is not None:
            stop.check(context.key, len(stop.encode(encoder)), context.max_new_tokens, context.cap_key)


class RolloutSource(Source):
    """Samples a group of responses for each prompt and scores them.

    Where the algorithm reads `greedy_scores`, every prompt is answered once more, with the most likely tokens, and
    every row of its group gets that answer's score.

    Attributes:
        surplus: groups with signal that dynamic sampling keeps for the next step.
        ahead: samples while the trainer trains; None in a synchronous run.

    A subclass that chooses prompts or groups, or adds columns, writes `draw`, with `answer` and `all_groups`.
    """

    Options: ClassVar[type[SourceOptions]] = RolloutOptions
    options: RolloutOptions
    context: RolloutContext

    def __init__(self, options: RolloutOptions, context: RolloutContext) -> None:
        super().__init__(options, context)
        self.temperature = context.sampling.temperature
        wants_greedy = "greedy_scores" in context.columns
        self._turn_columns = [name for name in context.columns if name in TURN_COLUMNS]
        self._greedy = replace(context.sampling, temperature=0.0, first_token=None) if wants_greedy else None
        self.surplus: list[Group] = []
        self._dropped: dict[str, list[int]] = {}
        self.ahead = None if context.ahead is None else import_part(*AHEAD, "rollout.staleness")(self)

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step: whole groups, all of one prompt on one rank."""
        if self.ahead is not None:
            groups = self.ahead.next(metrics)
        elif self.options.redraw is None:
            groups = self.draw(metrics)
        else:
            groups = import_part(*REDRAW, "algorithm.source.redraw")(self, self.options.redraw, metrics)
        return collate([row for group in groups for row in group])

    def draw(self, metrics: Metrics) -> list[Group]:
        """One round: this rank's share of the next prompts, as scored groups."""
        return self.answer(self.row_sampler.take(self.context.prompts)[self.context.share], metrics)

    def answer(self, local: list[tuple[int, int]], metrics: Metrics) -> list[Group]:
        """Samples and scores a group of responses for each of these (position, row) pairs of this rank."""
        rows = [self.context.rows[row] for _, row in local]
        return self._answer([position for position, _ in local], rows, metrics)

    def answer_row(self, position: int, row: dict[str, Any], metrics: Metrics, order: int) -> Group:
        """Samples and scores one group. Several threads may call it at a time.

        Args:
            position: of the row among all draws.
            order: see `Request`.
        """
        [group] = self._answer([position], [row], metrics, order)
        return group

    def _answer(
        self, positions: list[int], rows: list[dict[str, Any]], metrics: Metrics, order: int = -1
    ) -> list[Group]:
        context = self.context
        answers, scores = self._sample(rows, context.seeds(positions), context.sampling, metrics, order)
        for name, numbers in scores.numbers.items():
            metrics.mean(f"reward/{name}", numbers, is_scored(numbers))
        if self.options.interruption is not None:
            for trajectory in itertools.chain(*answers):
                metrics.add("rollout/interrupted", float(trajectory.forced_stops), trajectory.turns)
        shared: list[dict[str, Any]] = [{} for _ in rows]  # columns that all rows of a group have
        if self._greedy is not None:
            _, greedy = self._sample(rows, [[0] for _ in rows], self._greedy, metrics, order)
            metrics.mean("rollout/greedy_score", greedy.total, is_scored(greedy.total))
            shared = [{"greedy_scores": score} for score in greedy.total]
            scores = scores.drop_unknown(greedy.total.repeat_interleave(context.group_size))
        groups, place = [], 0
        plain = [_written(row) for row in rows]  # once for a group
        for position, written, columns, trajectories in zip(positions, plain, shared, answers, strict=True):
            group = []
            for sample, trajectory in enumerate(trajectories):
                unit = position * context.group_size + sample
                for row in self._rows_of(replace(trajectory, row=written), position, unit):
                    scores.add_to(row, place)
                    group.append(row | columns)
                place += 1
            groups.append(group)
        return groups

    def _rows_of(self, trajectory: Trajectory, group: int, unit: int) -> list[dict[str, Any]]:
        if self.context.answerer.episodes:
            return to_rows(trajectory, group=group, unit=unit, columns=self._turn_columns)
        return [to_row(trajectory, group=group, unit=unit)]

    def _sample(
        self, rows: list[dict[str, Any]], seeds: list[list[int]], sampling: Sampling, metrics: Metrics, order: int
    ) -> tuple[list[list[Trajectory]], Scores]:
        """Trajectories per row, and the scores of all of them in order."""
        asked = RowRequests(rows, seeds, sampling, self.options.interruption, order)
        answers, scores = self.context.answerer.answer_and_score(asked, self.context.scoring(), metrics)
        log_episodes([*itertools.chain(*answers)], metrics)
        return answers, scores.drop_groups([len(group) for group in answers])

    def all_groups(self, groups: list[Group]) -> list[Group]:
        """The groups of all ranks in the order in which they were drawn."""
        return sorted((group for part in self.context.world.gather(groups) for group in part), key=_position)

    def waiting(self) -> list[int]:
        return [_position(group) for group in self.surplus] if self.ahead is None else self.ahead.waiting()

    def drop(self, groups: list[Group], reason: str) -> None:
        """Records groups of this rank that never train, see `dropped`."""
        self._dropped.setdefault(reason, []).extend(map(_position, groups))

    def dropped(self) -> dict[str, list[int]]:
        dropped, self._dropped = self._dropped, {}
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and the groups of all ranks that are kept for the next step."""
        surplus = self.all_groups([keep_once(group) for group in self.surplus])
        ahead = {} if self.ahead is None else {"ahead": self.ahead.state_dict()}
        return super().state_dict() | {"surplus": surplus} | ahead

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.surplus = [share_again(group) for group in state["surplus"][self.context.share]]
        if self.ahead is not None and "ahead" in state:
            self.ahead.load_state_dict(state["ahead"])

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()


def draws_in_order(source: type[Source]) -> bool:
    """Whether a source takes each next row of the data set, so that it can be sampled ahead of its step."""
    if not issubclass(source, RolloutSource):
        return False
    return (source.next, source.draw) == (RolloutSource.next, RolloutSource.draw)


def check_term(key: str, term: str, context: CheckContext) -> None:
    """Refuses a reward term that the run does not have.

    Args:
        key: the yaml key of the node that names it as `term`.
    """
    if context.terms is not None and term not in context.terms:
        raise ValueError(
            f"{key}.term={term}: none of reward.terms, which are {', '.join(context.terms)}"
            f"{did_you_mean(term, context.terms)}"
        )


def _position(group: list[dict[str, Any]]) -> int:
    return int(group[0]["group"])


def _written(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the batch has it: with data: URLs in the place of media."""
    if not has_parts(row["prompt"]):
        return row
    written: dict[str, Any] = import_part("rft.data.encode.media.normal", "with_data_urls", "actor.processor")(row)
    return written
