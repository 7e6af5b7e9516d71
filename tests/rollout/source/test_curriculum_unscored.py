"""Solve rates where some rows have no score."""

import torch

from rft.metrics import Metrics
from tests.rollout.source.test_curriculum import FIXED, ROWS, source


def test_rows_without_a_score_are_in_no_count(ranks):
    """Every first answer of a prompt is unscored, and all answers of every second prompt."""

    def score(texts, rows):
        right = torch.ones(len(texts))
        for number, row in enumerate(rows):
            if number % 4 == 0 or ROWS.index(row) % 2:
                right[number] = torch.nan
        return right, {"right": right}

    def draw(world):
        made = source(world, prompts=len(ROWS), score=score)
        before = made._counts.clone()
        made.next(Metrics())
        return before, made._counts

    [(before, after)] = ranks(1, draw)
    assert torch.equal(after[1::2], before[1::2]), "nothing is known of them, so nothing fades either"
    torch.testing.assert_close(after[::2, 0], FIXED.keep * before[::2, 0] + 3, msg="three of the four answers count")
    torch.testing.assert_close(after[::2, 1], FIXED.keep * before[::2, 1])
