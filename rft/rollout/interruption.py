"""Forced stop: an answer that is too long gets a phrase that tells the model to conclude, and continues behind it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rft.batch.trajectory import Finish, Segment
from rft.rollout.answers import Answer, sampled_segment, uncut
from rft.rollout.engine.base import Completion, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.sampler import Sampler


@dataclass(frozen=True)
class Interruption:
    """Samples answers with a forced stop.

    Attributes:
        stop: its options.
        phrase: the tokens of the phrase.
    """

    stop: ForcedStop
    phrase: list[int]

    def generate(
        self,
        sampler: Sampler,
        requests: list[Request],
        sampling: Sampling,
        announce: Callable[[int, int, Answer], None],
    ) -> list[list[Answer]]:
        """Samples every request. An answer depends on its own seed alone, as with `Sampler.generate`.

        Args:
            announce: called with the numbers of a request and of its sample, and the answer when it is whole.

        Returns:
            Answers per request: one sampled segment, or two around the phrase.
        """
        most = sampling.max_new_tokens
        first = [replace(r, limits=[self.limit(seed, most) for seed in r.seeds]) for r in requests]

        def rest_of(request: int, sample: int, start: Completion) -> Request | None:
            asked = requests[request]
            rest = self.rest(asked.prompt, start, asked.seeds[sample], most)
            return None if rest is None else replace(rest, order=asked.order)

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
            return self.joined(starts[i][j], end)

        def announce_joined(number: int, _: int, end: Completion) -> None:
            announce(*cut[number], joined(number, end))

        ends = sampler.generate([*requested.values()], self.sampling_of_rest(sampling), announce_joined)
        for number, [end] in enumerate(ends):
            i, j = cut[number]
            answers[i][j] = joined(number, end)
        return answers

    def limit(self, seed: int, most: int) -> int:
        """Tokens of an answer before the phrase.

        Args:
            seed: of the answer.
            most: tokens of the answer in all; where they leave no room for the phrase, it is not inserted.
        """
        room = most - len(self.phrase) - 1
        if room < 1:
            return most
        low, high = (max(1, min(round(share * most), room)) for share in self.stop.after)
        return low + row_seed(seed, 0, 0) % (high - low + 1)

    def rest(self, prompt: list[int], start: Completion, seed: int, most: int) -> Request | None:
        """The request for what follows the phrase; None if the answer has ended, or has no room for the phrase.

        Args:
            prompt: of the answer.
            start: what was sampled of it, of at most `limit` tokens.
            seed, most: see `limit`.
        """
        tokens = start.tokens + self.phrase
        if start.finish_reason != "length" or len(tokens) >= most:
            return None
        return Request(prompt + tokens, [row_seed(seed, 0, 1)], [most - len(tokens)])

    def sampling_of_rest(self, sampling: Sampling) -> Sampling:
        """How the rest is sampled: as the start, but its first token is not the first one of an answer."""
        return replace(sampling, first_token=None)

    def joined(self, start: Completion, end: Completion) -> Answer:
        """The answer of both parts and the phrase between them."""
        inserted = Segment(self.phrase, trains=False, continues=True)
        segments = [sampled_segment(start), inserted, replace(sampled_segment(end), continues=True)]
        return Answer(segments, Finish(end.finish_reason, start.text + self.stop.phrase + end.text))
