"""Forced interruption: an answer that goes on for too long is told to conclude, and does so in the same row."""

from dataclasses import dataclass, replace

from rft.rollout.engine.base import Completion, Engine, Request, row_seed
from rft.rollout.engine.sampling import Sampling


@dataclass
class ForcedStop:
    """Control of the length by a phrase in the middle of an answer (ScaleRL, 2510.13786).

    An answer that has not ended in time gets the phrase and goes on to its end; the two parts and the phrase together
    are no longer than `rollout.max_new_tokens`. The phrase is read and does not train, because nobody sampled it.

    Attributes:
        after: smallest and largest share of `rollout.max_new_tokens` that an answer has before the phrase, drawn evenly
            for every row; less where it would leave no room for the phrase and one token more.
        phrase: what is put in.
    """

    after: list[float]
    phrase: str

    def __post_init__(self) -> None:
        if len(self.after) != 2 or not 0 < self.after[0] <= self.after[1] < 1:
            raise ValueError(
                f"algorithm.source.interruption.after={self.after}: expected [low, high], two shares of "
                "rollout.max_new_tokens above 0 and below 1"
            )
        if not self.phrase:
            raise ValueError("algorithm.source.interruption.phrase is empty: write what an answer is told")

    def generate(
        self, engine: Engine, requests: list[Request], sampling: Sampling, phrase: list[int]
    ) -> list[list[Completion]]:
        """As `Engine.generate`, with answers that were interrupted. A row depends on its own seed, as ever.

        Args:
            phrase: the tokens of the phrase.
        """
        most = sampling.max_new_tokens
        first = [replace(r, limits=[self._limit(seed, most, len(phrase)) for seed in r.seeds]) for r in requests]
        found = engine.generate(first, sampling, None)
        cut = [(i, j) for i, group in enumerate(found) for j, c in enumerate(group) if c.finish_reason == "length"]
        rest = []
        for i, j in cut:
            said = found[i][j].tokens + phrase
            rest.append(Request(requests[i].prompt + said, [row_seed(requests[i].seeds[j], 0, 1)], [most - len(said)]))
        ends = engine.generate(rest, replace(sampling, first_token=None), None)
        for (i, j), [end] in zip(cut, ends, strict=True):
            start = found[i][j]
            found[i][j] = replace(
                end,
                tokens=start.tokens + phrase + end.tokens,
                logprobs=start.logprobs + [0.0] * len(phrase) + end.logprobs,
                text=start.text + self.phrase + end.text,
                versions=start.versions + end.versions[:1] * len(phrase) + end.versions,
                given=range(len(start.tokens), len(start.tokens) + len(phrase)),
            )
        return found

    def _limit(self, seed: int, most: int, phrase: int) -> int:
        """Tokens of a row before a phrase of so many, of at most so many in all."""
        low, high = (max(1, min(round(share * most), most - phrase - 1)) for share in self.after)
        return low + row_seed(seed, 0, 0) % (high - low + 1)
