"""How rows of a data set are answered: by one completion each, or in another way, such as an episode."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rft.batch.trajectory import Trajectory
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.imports import import_part
from rft.registry import Plugin
from rft.rollout.answers import Announce, KeptMarks, single_turn
from rft.rollout.engine.base import Completion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.sampler import Sampler

ENVIRONMENTS = "rft.rollout.environment"  # a part: it is imported where the config names environments


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

    def answer(
        self,
        rows: Rows,
        seeds: Sequence[list[int]],
        sampling: Sampling,
        announce: Announce,
        forced_stop: ForcedStop | None = None,
    ) -> list[list[Trajectory]]:
        """Answers every row as often as it has seeds.

        Args:
            rows: of the data set.
            seeds: of the samples of each row; a trajectory is a function of row, seed, sampling and weights.
            announce: called with each trajectory when it is finished, in any order and from any thread, one call at a
                time.
            forced_stop: of answers that are too long; None: they end at the limit. In an episode each answer has it.

        Returns:
            The trajectories of each row, in the order of its seeds. `Finish.prompt_opens` is set.
        """

        def announce_read(number: int, sample: int, trajectory: Trajectory) -> None:
            announce(number, sample, self._read(trajectory, sampling))

        found = self._answer(rows, seeds, sampling, announce_read, forced_stop)
        return [[self._read(trajectory, sampling) for trajectory in group] for group in found]

    @abstractmethod
    def _answer(
        self,
        rows: Rows,
        seeds: Sequence[list[int]],
        sampling: Sampling,
        announce: Announce,
        forced_stop: ForcedStop | None,
    ) -> list[list[Trajectory]]:
        """`answer` without `Finish.prompt_opens`."""

    def _read(self, trajectory: Trajectory, sampling: Sampling) -> Trajectory:
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

    def __init__(self, encoder: Encoder, sampler: Sampler, formats: Iterable[Plugin] = ()) -> None:
        super().__init__(encoder, sampler)
        self._marks = KeptMarks(encoder, formats)

    def _read(self, trajectory: Trajectory, sampling: Sampling) -> Trajectory:
        """See `Answerer._read`; with the marks of tool calls in its text."""
        trajectory = super()._read(trajectory, sampling)
        answer = [token for segment in trajectory.segments[1:] for token in segment.tokens]
        text, finish = self._marks.text(answer, sampling.stop), trajectory.finish
        if text is None or finish is None:
            return trajectory
        return replace(trajectory, finish=replace(finish, text=text))

    def _answer(
        self,
        rows: Rows,
        seeds: Sequence[list[int]],
        sampling: Sampling,
        announce: Announce,
        forced_stop: ForcedStop | None,
    ) -> list[list[Trajectory]]:
        requests = [Request(prompt, own) for prompt, own in zip(self._encoder.prompts(rows), seeds, strict=True)]
        if forced_stop is not None:
            phrase = forced_stop.encode(self._encoder)
            return forced_stop.generate(self._sampler, requests, rows, sampling, phrase, announce)

        def trajectory(number: int, completion: Completion) -> Trajectory:
            return single_turn(requests[number].prompt, completion, rows[number])

        completions = self._sampler.generate(
            requests, sampling, lambda number, sample, found: announce(number, sample, trajectory(number, found))
        )
        return [[trajectory(number, found) for found in group] for number, group in enumerate(completions)]


class Episodes(ABC):
    """What the node `environment` names: the environments of a run, read and checked."""

    @abstractmethod
    def check(self, encoder: Encoder) -> None:
        """Checks that the template can write dialogues, and that the environments can be built.

        Args:
            encoder: of the run.

        Raises:
            ValueError: names the key and the cure.
        """

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """Most tokens of an episode behind its prompt, those that the environment gives included."""

    @property
    @abstractmethod
    def columns_if_read(self) -> tuple[str, ...]:
        """The columns of turns that episodes can have."""

    @property
    @abstractmethod
    def scores(self) -> bool:
        """Whether every environment has a reward of its own."""

    @property
    @abstractmethod
    def several_players(self) -> bool:
        """Whether an environment is a game of several players."""


def episodes_of(node: Any) -> Episodes | None:
    """The episodes that a node `environment` names; None where a completion is the whole answer.

    Raises:
        ValueError: names the key and the cure.
    """
    if node is None:
        return None
    made: Episodes = import_part(f"{ENVIRONMENTS}.options", "environments", "environment")(node)
    return made


def episode_answerer(episodes: Episodes, encoder: Encoder, sampler: Sampler, context: int) -> Answerer:
    """Answers rows by episodes.

    Args:
        episodes: of the run.
        encoder, sampler: see `Answerer`.
        context: most tokens of a text that the model reads.
    """
    answerer = import_part(f"{ENVIRONMENTS}.episodes", "EpisodeAnswerer", "environment")
    made: Answerer = answerer(episodes, encoder, sampler, context)
    return made
