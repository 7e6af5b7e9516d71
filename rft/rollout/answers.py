"""How rows of a data set are answered: by one completion each, or in another way, such as an episode."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.rollout.engine.base import Completion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler

Announce = Callable[[int, int, Trajectory], None]  # the number of a row, that of its sample, the finished trajectory


class Answerer(ABC):
    """Answers rows with the weights that the sampler holds. Training and held-out evaluation share it.

    Attributes:
        episodes: an answer is an episode: it has any number of turns, and maybe several batch rows.
    """

    episodes: ClassVar[bool] = False

    @abstractmethod
    def answer(
        self, rows: Rows, seeds: Sequence[list[int]], sampling: Sampling, announce: Announce
    ) -> list[list[Trajectory]]:
        """Answers every row as often as it has seeds.

        Args:
            rows: of the data set.
            seeds: of the samples of each row; a trajectory is a function of row, seed, sampling and weights.
            announce: called with each trajectory when it is finished, in any order and from any thread, one call at a
                time.

        Returns:
            The trajectories of each row, in the order of its seeds.
        """


class SingleTurn(Answerer):
    """One completion is the answer.

    Args:
        encoder: makes the prompt of a row.
        sampler: samples.
    """

    def __init__(self, encoder: Encoder, sampler: Sampler) -> None:
        self._encoder = encoder
        self._sampler = sampler

    def answer(
        self, rows: Rows, seeds: Sequence[list[int]], sampling: Sampling, announce: Announce
    ) -> list[list[Trajectory]]:
        """See `Answerer.answer`."""
        requests = [Request(prompt, own) for prompt, own in zip(self._encoder.prompts(rows), seeds, strict=True)]

        def trajectory(number: int, completion: Completion) -> Trajectory:
            return single_turn(requests[number].prompt, completion, rows[number])

        completions = self._sampler.generate(
            requests, sampling, lambda number, sample, found: announce(number, sample, trajectory(number, found))
        )
        return [[trajectory(number, found) for found in group] for number, group in enumerate(completions)]


def sampled_segment(completion: Completion) -> Segment:
    """The segment of a completion: all of it trains."""
    return Segment(completion.tokens, True, completion.logprobs, completion.versions)


def single_turn(prompt: list[int], completion: Completion, row: dict[str, Any]) -> Trajectory:
    """The trajectory of one sampled response to a prompt.

    Args:
        prompt: token ids.
        row: of the data set.
    """
    finish = Finish(completion.finish_reason, completion.text)
    return Trajectory([Segment(prompt, trains=False), sampled_segment(completion)], finish, row)
