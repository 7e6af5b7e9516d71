"""How rows of a data set are answered: by one completion each, or in another way, such as an episode."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rft.algorithm.algorithm import Algorithm
from rft.batch.scores import Scores, Scoring
from rft.batch.trajectory import Trajectory
from rft.data.base import SourceFacts
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.imports import import_part
from rft.metrics import Metrics
from rft.registry import Plugin
from rft.rollout.answers import Announce, Answer, failure_of, uncut
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.sampler import Sampler

REWARD = "environment"  # the reward term with the environment's own reward
KEPT_MARKS = ("rft.rollout.kept_marks", "KeptMarks")  # a part: runs whose rewards read tool calls import it
ENVIRONMENTS = "rft.rollout.environment"  # a part: it is imported where the config names environments


@dataclass(frozen=True)
class RowRequests:
    """Rows of the data set that are answered together.

    Attributes:
        rows: of the data set.
        seeds: of the samples of each row; a trajectory is a function of row, seed, sampling and weights.
        sampling: how answers are drawn.
        forced_stop: of answers that are too long; None: they end at the limit. In an episode each answer has it.
        order: see `Request`.
    """

    rows: Rows
    seeds: Sequence[list[int]]
    sampling: Sampling
    forced_stop: ForcedStop | None = None
    order: int = -1


class Answerer(ABC):
    """Answers rows with the weights that the sampler holds. Training and held-out evaluation share it.

    Attributes:
        episodes: an answer is an episode: it has any number of turns, and maybe several batch rows.

    Args:
        encoder: makes the prompt of a row.
        sampler: samples.
    """

    episodes: ClassVar[bool] = False

    def __init__(self, encoder: Encoder, sampler: Sampler) -> None:
        self._encoder = encoder
        self._sampler = sampler

    @abstractmethod
    def answer(self, asked: RowRequests, announce: Announce) -> list[list[Trajectory]]:
        """Answers every row as often as it has seeds.

        Args:
            announce: called with each trajectory when it is finished, in any order and from any thread, one call at a
                time.

        Returns:
            The trajectories of each row, in the order of its seeds. `Finish.prompt_opens` is set.
        """

    def answer_and_score(
        self,
        asked: RowRequests,
        scoring: Scoring,
        metrics: Metrics,
        progress: Callable[[int], None] = lambda done: None,
    ) -> tuple[list[list[Trajectory]], Scores]:
        """What `answer` returns, and the scores of all answers in order; one whose episode failed has none.

        Args:
            scoring: begins with each answer that is finished.
            metrics: get the timers `rollout` and `reward`.
            progress: called with the number of answers that are finished.
        """
        firsts, done = [0, *itertools.accumulate(map(len, asked.seeds))], itertools.count(1)
        with scoring:

            def announce(number: int, sample: int, trajectory: Trajectory) -> None:
                scoring.add(firsts[number] + sample, trajectory.text, trajectory.fields)
                progress(next(done))

            with metrics.timer("rollout"):
                groups = self.answer(asked, announce)
            answers = [trajectory for group in groups for trajectory in group]
            texts, answered = [answer.text for answer in answers], [answer.fields for answer in answers]
            with metrics.timer("reward"):
                scores = scoring.finish(texts, answered)
        return groups, scores.drop_failed([failure_of(answer) for answer in answers])

    def with_opened_thought(self, trajectory: Trajectory) -> Trajectory:
        """A trajectory with the thought that the prompt of its last answer opens."""
        opened, finish = self._encoder.thoughts.opened(trajectory.last_prompt), trajectory.finish
        if opened is None or finish is None:
            return trajectory
        return replace(trajectory, finish=replace(finish, prompt_opens=opened))


class SingleTurn(Answerer):
    """One completion is the answer.

    Args:
        encoder, sampler: see `Answerer`.
        formats: of the tool calls that rewards read. The texts of answers keep their marks.
    """

    def __init__(self, encoder: Encoder, sampler: Sampler, formats: Sequence[Plugin] = ()) -> None:
        super().__init__(encoder, sampler)
        self._marks = import_part(*KEPT_MARKS, "the rewards read tool calls")(encoder, formats) if formats else None

    def answer(self, asked: RowRequests, announce: Announce) -> list[list[Trajectory]]:
        rows, sampling, forced_stop = asked.rows, asked.sampling, asked.forced_stop
        prompts = self._encoder.prompts(rows)
        order = asked.order
        requests = [Request(prompt, seeds, order=order) for prompt, seeds in zip(prompts, asked.seeds, strict=True)]

        def trajectory(number: int, answer: Answer) -> Trajectory:
            text = None if self._marks is None else self._marks.text(answer.tokens, sampling.stop)
            finish = answer.finish if text is None else replace(answer.finish, text=text)
            whole = replace(answer, finish=finish).trajectory(requests[number].prompt, rows[number])
            return self.with_opened_thought(whole)

        def announce_answer(number: int, sample: int, answer: Answer) -> None:
            announce(number, sample, trajectory(number, answer))

        if forced_stop is None:
            completions = self._sampler.generate(
                requests, sampling, lambda number, sample, whole: announce_answer(number, sample, uncut(whole))
            )
            answers = [[uncut(completion) for completion in group] for group in completions]
        else:
            interruption = forced_stop.with_encoder(self._encoder)
            answers = interruption.generate(self._sampler, requests, sampling, announce_answer)
        return [[trajectory(number, answer) for answer in group] for number, group in enumerate(answers)]


@dataclass(frozen=True)
class Episodes(ABC):
    """What the node `environment` names: the environments of a run, read and checked.

    Attributes:
        max_tokens: most tokens of an episode behind its prompt, those that the environment gives included.
        columns_if_read: the columns of turns that episodes can have.
        scores: whether every environment has a reward of its own.
        several_players: whether an environment is a game of several players.
    """

    max_tokens: int
    columns_if_read: tuple[str, ...]
    scores: bool
    several_players: bool

    @abstractmethod
    def check(self, encoder: Encoder) -> None:
        """Checks that the template can write dialogues, and that the environments can be built.

        Args:
            encoder: of the run.

        Raises:
            ValueError: names the key and the cure.
        """

    @abstractmethod
    def check_run(
        self, algorithm: Algorithm, facts: SourceFacts, mode: str, scored: bool, media: bool, canary: bool
    ) -> Iterator[str]:
        """Checks that the run can answer with episodes.

        Args:
            algorithm, facts, mode: of the run, and of its source.
            scored: the reward has the term of the environment's own reward.
            media: the policy takes media.
            canary: the run has canary tasks.

        Yields:
            A message for every mistake.
        """


def episodes_of(node: Any) -> Episodes | None:
    """The episodes that a node `environment` names; None where a completion is the whole answer.

    Raises:
        ValueError: names the key and the cure.
    """
    if node is None:
        return None
    episodes: Episodes = import_part(f"{ENVIRONMENTS}.options", "environments", "environment")(node)
    return episodes


def episode_answerer(episodes: Episodes, encoder: Encoder, sampler: Sampler, context: int) -> Answerer:
    """Answers rows by episodes.

    Args:
        episodes: of the run.
        encoder, sampler: see `Answerer`.
        context: most tokens of a text that the model reads.
    """
    build = import_part(f"{ENVIRONMENTS}.episodes", "EpisodeAnswerer", "environment")
    answerer: Answerer = build(episodes, encoder, sampler, context)
    return answerer
