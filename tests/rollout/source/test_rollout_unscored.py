"""Rows without a score: of a prompt whose greedy answer has none, and of a group that one of its rows drops."""

from dataclasses import replace

import torch

from rft.batch.columns import fields
from rft.batch.scores import Scores, ScoringAtEnd, is_scored
from rft.metrics import Metrics
from rft.rollout.source.rollout import RolloutSource
from tests.rollout.contexts import rollout_context
from tests.rollout.source.test_rollout import GROUP, ROWS, SAMPLING, SEED, Encoder, Engine, source


def test_a_prompt_whose_greedy_answer_has_no_score_does_not_train(ranks):
    def score(texts, rows):
        pairs = zip(texts, rows, strict=True)
        unknown = torch.tensor(["greedy" in text and int(row["answer"]) % 2 == 0 for text, row in pairs])
        total = torch.ones(len(texts)).masked_fill(unknown, torch.nan)
        return total, {"right": total}

    def work(world):
        metrics = Metrics()
        batch = source(world, prompts=10, columns=("greedy_scores",), scores=score).next(metrics)
        return batch, metrics.reduce(world.gather)["rollout/greedy_score"]

    [(batch, greedy)] = ranks(1, work)
    odd = [int(row["answer"]) % 2 == 1 for row in fields(batch)]
    assert is_scored(batch["scores"]).tolist() == odd and sum(odd) == 5 * GROUP
    assert greedy == 1.0, "the mean of those that have a score"


def test_one_row_drops_its_group_and_no_other(ranks):
    def score(texts, rows):
        plain = Scores.plain(torch.ones(len(texts)), {"right": torch.ones(len(texts))})
        falls = torch.tensor([number % GROUP == 1 and row["answer"] == "3" for number, row in enumerate(rows)])
        return replace(plain, whole_group=falls)

    def work(world):
        context = rollout_context(world, Engine(), Encoder(), ROWS, 10, GROUP, SAMPLING, SEED)
        options = RolloutSource.Options(redraw=None, interruption=None)
        made = RolloutSource(options, replace(context, scoring=lambda: ScoringAtEnd(score)))
        return made.next(Metrics())

    [batch] = ranks(1, work)
    assert is_scored(batch["scores"]).tolist() == [row["answer"] != "3" for row in fields(batch)]
