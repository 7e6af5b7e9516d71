"""What a source announces to the scoring of its responses."""

from dataclasses import replace

import torch

from rft.batch.columns import fields
from rft.batch.scores import Scores, ScoringAtEnd
from rft.metrics import Metrics
from rft.rollout.source.rollout import RolloutSource
from tests.rollout.contexts import rollout_context
from tests.rollout.source.test_rollout import GROUP, ROWS, SAMPLING, SEED, Encoder, Engine


def test_responses_are_announced_to_the_scoring_while_others_are_sampled(ranks):
    events = []

    class Announcing(Engine):
        def generate(self, requests, sampling, on_completion=None):
            found = super().generate(requests, sampling)
            for number, group in reversed([*enumerate(found)]):
                for sample, completion in enumerate(group):
                    on_completion(number, sample, completion)
            events.append("sampled")
            return found

    class Recording(ScoringAtEnd):
        def add(self, number, response, row):
            events.append((number, response, row["answer"]))

    def zeros(texts, rows):
        return Scores.plain(torch.zeros(len(texts)), {})

    def work(world):
        context = rollout_context(world, Announcing(), Encoder(), ROWS, 4, GROUP, SAMPLING, SEED)
        context = replace(context, scoring=lambda: Recording(zeros))
        return RolloutSource(RolloutSource.Options(redraw=None, interruption=None), context).next(Metrics())

    [batch] = ranks(1, work)
    *announced, last = events
    assert last == "sampled" and [number for number, _, _ in announced] == [
        number for group in (3, 2, 1, 0) for number in range(group * GROUP, (group + 1) * GROUP)
    ]
    assert sorted(announced) == [(n, row["text"], row["answer"]) for n, row in enumerate(fields(batch))]
