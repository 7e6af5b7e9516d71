"""Forced stop: an answer that is too long gets a phrase that tells the model to conclude, and continues behind it."""

from dataclasses import dataclass, replace
from typing import Any

from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.ranges import OpenFraction
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler
from rft.rollout.source.base import Announce, answer, sampled_segment


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
            announce: called with every text when it is finished.

        Returns:
            Trajectories per request: one sampled segment, or two around the phrase.
        """
        most = sampling.max_new_tokens
        first = [replace(r, limits=[self._limit(seed, most, len(phrase)) for seed in r.seeds]) for r in requests]

        def announce_uncut(request: int, sample: int, completion: Completion) -> None:
            if completion.finish_reason != "length":
                announce(request, sample, completion.text)

        started = sampler.generate(first, sampling, announce_uncut)
        found = [
            [answer(request.prompt, completion, row) for completion in group]
            for request, group, row in zip(requests, started, rows, strict=True)
        ]
        cut = [(i, j) for i, group in enumerate(started) for j, c in enumerate(group) if c.finish_reason == "length"]
        rest = []
        for i, j in cut:
            tokens = started[i][j].tokens + phrase
            seeds = [row_seed(requests[i].seeds[j], 0, 1)]
            rest.append(Request(requests[i].prompt + tokens, seeds, [most - len(tokens)]))

        def whole(number: int, end: Completion) -> str:
            i, j = cut[number]
            return started[i][j].text + self.phrase + end.text

        def announce_whole(number: int, _: int, end: Completion) -> None:
            announce(*cut[number], whole(number, end))

        ends = sampler.generate(rest, replace(sampling, first_token=None), announce_whole)
        for number, ((i, j), [end]) in enumerate(zip(cut, ends, strict=True)):
            segments = [*found[i][j].segments, Segment(phrase, trains=False), sampled_segment(end)]
            finish = Finish(end.finish_reason, whole(number, end))
            found[i][j] = replace(found[i][j], segments=segments, finish=finish)
        return found

    def _limit(self, seed: int, most: int, phrase: int) -> int:
        """Tokens of an answer before the phrase of `phrase` tokens; the answer has at most `most` tokens in all."""
        low, high = (max(1, min(round(share * most), most - phrase - 1)) for share in self.after)
        return low + row_seed(seed, 0, 0) % (high - low + 1)
