"""Forced stop: an answer that is too long gets a phrase that tells the model to conclude, and continues behind it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rft.batch.trajectory import Finish, Segment
from rft.data.encode.encoder import Encoder
from rft.ranges import OpenFraction
from rft.rollout.answers import Answer, sampled_segment, uncut
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler


@dataclass(frozen=True)
class ForcedStop:
    """Control of the length by a phrase in the middle of an answer (ScaleRL, 2510.13786).

    An answer that has not ended in time gets the phrase and continues to its end. Both parts and the phrase together
    have at most as many tokens as the answer may have: `rollout.max_new_tokens`, or less where fewer are left to a
    dialogue. The phrase does not train, because the engine did not sample it.

    Attributes:
        after: smallest and largest share of these tokens that an answer has before the phrase. The length is drawn
            uniformly for every answer; it is less where there would be no room for the phrase and one token more.
        phrase: the text that is inserted.
    """

    after: tuple[OpenFraction, OpenFraction]
    phrase: str

    def __post_init__(self) -> None:
        if self.after[0] > self.after[1]:
            raise ValueError(f"algorithm.source.interruption.after={list(self.after)}: put the smaller share first")
        if not self.phrase:
            raise ValueError("algorithm.source.interruption.phrase is empty: give the text that is inserted")

    def check(self, key: str, phrase: int, most: int, most_key: str) -> None:
        """Refuses a phrase that leaves no room for an answer.

        Args:
            key: the yaml key of the source.
            phrase: tokens of the phrase.
            most: cap on the tokens of a response.
            most_key: its yaml key.
        """
        if phrase + 2 > most:
            raise ValueError(
                f"{key}.interruption.phrase has {phrase} tokens, which with one before and one behind is more than "
                f"{most_key}={most}; shorten it, raise {most_key} or choose another algorithm/source"
            )

    def encode(self, encoder: Encoder) -> list[int]:
        """The tokens of the phrase."""
        return encoder.encode([self.phrase])[0]

    def generate(
        self,
        sampler: Sampler,
        requests: list[Request],
        sampling: Sampling,
        phrase: list[int],
        announce: Callable[[int, int, Answer], None],
    ) -> list[list[Answer]]:
        """Samples every request. An answer depends on its own seed alone, as with `Sampler.generate`.

        Args:
            phrase: the tokens of the phrase.
            announce: called with the numbers of a request and of its sample, and the answer when it is whole.

        Returns:
            Answers per request: one sampled segment, or two around the phrase.
        """
        most = sampling.max_new_tokens
        first = [replace(r, limits=[self.limit(seed, most, phrase) for seed in r.seeds]) for r in requests]

        def rest_of(request: int, sample: int, start: Completion) -> Request | None:
            return self.rest(requests[request].prompt, start, requests[request].seeds[sample], most, phrase)

        def announce_uncut(request: int, sample: int, completion: Completion) -> None:
            if rest_of(request, sample, completion) is None:
                announce(request, sample, uncut(completion))

        starts = sampler.generate(first, sampling, announce_uncut)
        answers = [[uncut(start) for start in group] for group in starts]
        rests = {(i, j): rest_of(i, j, start) for i, group in enumerate(starts) for j, start in enumerate(group)}
        requested = {place: request for place, request in rests.items() if request is not None}
        cut = list(requested)

        def joined(number: int, end: Completion) -> Answer:
            i, j = cut[number]
            return self.joined(starts[i][j], end, phrase)

        def announce_joined(number: int, _: int, end: Completion) -> None:
            announce(*cut[number], joined(number, end))

        ends = sampler.generate([*requested.values()], self.sampling_of_rest(sampling), announce_joined)
        for number, [end] in enumerate(ends):
            i, j = cut[number]
            answers[i][j] = joined(number, end)
        return answers

    def limit(self, seed: int, most: int, phrase: list[int]) -> int:
        """Tokens of an answer before the phrase.

        Args:
            seed: of the answer.
            most: tokens of the answer in all; where they leave no room for the phrase, it is not inserted.
            phrase: its tokens.
        """
        room = most - len(phrase) - 1
        if room < 1:
            return most
        low, high = (max(1, min(round(share * most), room)) for share in self.after)
        return low + row_seed(seed, 0, 0) % (high - low + 1)

    def rest(self, prompt: list[int], start: Completion, seed: int, most: int, phrase: list[int]) -> Request | None:
        """The request for what follows the phrase; None if the answer has ended, or has no room for the phrase.

        Args:
            prompt: of the answer.
            start: what was sampled of it, of at most `limit` tokens.
            seed, most, phrase: see `limit`.
        """
        tokens = start.tokens + phrase
        if start.finish_reason != "length" or len(tokens) >= most:
            return None
        return Request(prompt + tokens, [row_seed(seed, 0, 1)], [most - len(tokens)])

    def sampling_of_rest(self, sampling: Sampling) -> Sampling:
        """How the rest is sampled: as the start, but its first token is not the first one of an answer."""
        return replace(sampling, first_token=None)

    def joined(self, start: Completion, end: Completion, phrase: list[int]) -> Answer:
        """The answer of both parts and the phrase between them."""
        inserted = Segment(phrase, trains=False, continues=True)
        segments = [sampled_segment(start), inserted, replace(sampled_segment(end), continues=True)]
        return Answer(segments, Finish(end.finish_reason, start.text + self.phrase + end.text))
