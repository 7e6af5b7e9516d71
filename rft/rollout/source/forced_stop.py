"""Forced stop: an answer that is too long gets a phrase that tells the model to conclude, and continues behind it."""

from dataclasses import dataclass, replace
from typing import Any

from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.ranges import OpenFraction
from rft.rollout.answers import Announce, sampled_segment, single_turn
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler


@dataclass
class ForcedStop:
    """Control of the length by a phrase in the middle of an answer (ScaleRL, 2510.13786).

    An answer that has not ended in time gets the phrase and continues to its end. Both parts and the phrase together
    have at most `rollout.max_new_tokens` tokens. The phrase does not train, because the engine did not sample it.

    Attributes:
        after: smallest and largest share of `rollout.max_new_tokens` that an answer has before the phrase. The length
            is drawn uniformly for every row; it is less where there would be no room for the phrase and one token more.
        phrase: the text that is inserted.
    """

    after: tuple[OpenFraction, OpenFraction]
    phrase: str

    def __post_init__(self) -> None:
        if self.after[0] > self.after[1]:
            raise ValueError(f"algorithm.source.interruption.after={list(self.after)}: put the smaller share first")
        if not self.phrase:
            raise ValueError("algorithm.source.interruption.phrase is empty: give the text that is inserted")

    def check(self, key: str, phrase: int, new_tokens: int) -> None:
        """Refuses a phrase that leaves no room for an answer.

        Args:
            key: the yaml key of the source.
            phrase: tokens of the phrase.
            new_tokens: cap on the tokens of a response.
        """
        if phrase + 2 > new_tokens:
            raise ValueError(
                f"{key}.interruption.phrase has {phrase} tokens, which with one before and one behind is more than "
                f"rollout.max_new_tokens={new_tokens}; shorten it, raise rollout.max_new_tokens or choose another "
                "algorithm/source"
            )

    def generate(
        self,
        sampler: Sampler,
        requests: list[Request],
        rows: list[dict[str, Any]],
        sampling: Sampling,
        phrase: list[int],
        announce: Announce,
    ) -> list[list[Trajectory]]:
        """Samples every request. A trajectory depends on its own seed alone, as with `Sampler.generate`.

        Args:
            rows: of the data set, one a request.
            phrase: the tokens of the phrase.
            announce: see `Answerer.answer`.

        Returns:
            Trajectories per request: one sampled segment, or two around the phrase.
        """
        most = sampling.max_new_tokens
        first = [replace(r, limits=[self._limit(seed, most, len(phrase)) for seed in r.seeds]) for r in requests]

        def announce_uncut(request: int, sample: int, completion: Completion) -> None:
            if completion.finish_reason != "length":
                announce(request, sample, single_turn(requests[request].prompt, completion, rows[request]))

        started = sampler.generate(first, sampling, announce_uncut)
        found = [
            [single_turn(request.prompt, completion, row) for completion in group]
            for request, group, row in zip(requests, started, rows, strict=True)
        ]
        cut = [(i, j) for i, group in enumerate(started) for j, c in enumerate(group) if c.finish_reason == "length"]
        rest = []
        for i, j in cut:
            tokens = started[i][j].tokens + phrase
            seeds = [row_seed(requests[i].seeds[j], 0, 1)]
            rest.append(Request(requests[i].prompt + tokens, seeds, [most - len(tokens)]))

        def whole(number: int, end: Completion) -> Trajectory:
            i, j = cut[number]
            start = found[i][j]
            assert start.finish is not None
            finish = Finish(end.finish_reason, start.finish.text + self.phrase + end.text)
            segments = [*start.segments, Segment(phrase, trains=False), sampled_segment(end)]
            return replace(start, segments=segments, finish=finish)

        def announce_whole(number: int, _: int, end: Completion) -> None:
            announce(*cut[number], whole(number, end))

        ends = sampler.generate(rest, replace(sampling, first_token=None), announce_whole)
        wholes = [whole(number, end) for number, [end] in enumerate(ends)]
        for (i, j), trajectory in zip(cut, wholes, strict=True):
            found[i][j] = trajectory
        return found

    def _limit(self, seed: int, most: int, phrase: int) -> int:
        """Tokens of an answer before the phrase of `phrase` tokens; the answer has at most `most` tokens in all."""
        low, high = (max(1, min(round(share * most), most - phrase - 1)) for share in self.after)
        return low + row_seed(seed, 0, 0) % (high - low + 1)
