"""The advantage against a tracked solve rate."""

import pytest
import torch

from rft.algorithm import ADVANTAGES
from tests.helpers import batch_of


def batch(keep, baseline):
    keep = torch.as_tensor(keep).bool()
    return batch_of(keep, torch.arange(len(keep)), baseline_scores=torch.tensor(baseline))


def spo(scores, batch, all_sum=lambda tensor: tensor):
    scores = torch.as_tensor(scores)
    found = ADVANTAGES.build({"name": "spo"}, "algorithm.advantage")(
        scores, torch.zeros(batch["loss_mask"].shape, dtype=scores.dtype), batch, all_sum=all_sum
    )
    assert list(found) == ["advantages"]
    return found["advantages"]


KEEP = [[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
SCORES = torch.tensor([1.0, 0.0, 1.0, 50.0], dtype=torch.float64)
BASELINE = [0.25, 0.25, 0.75, 0.5]


def test_by_hand():
    """R - p of the rows that train: 0.75, -0.25, 0.25; mean 0.25 and deviation 0.5. The last row counts nowhere."""
    found = spo(SCORES, batch(KEEP, BASELINE))
    expected = torch.tensor(KEEP, dtype=torch.float64) * torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert found.dtype == torch.float64


def test_statistics_are_of_all_ranks(ranks):
    def part(world):
        mine = slice(world.rank, None, world.size)
        return spo(SCORES[mine], batch(KEEP, BASELINE)[mine], world.all_sum)

    one, two = ranks(2, part)
    torch.testing.assert_close(torch.stack([one[0], two[0], one[1], two[1]]), spo(SCORES, batch(KEEP, BASELINE)))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_rows_that_nothing_tells_apart_get_nothing(count):
    rows = batch(torch.ones(count, 3), [0.3] * count)
    found = spo(torch.full((count,), 0.3), rows)
    assert found.shape == (count, 3) and found.dtype == torch.float32
    torch.testing.assert_close(found, torch.zeros(count, 3), rtol=0, atol=1e-6)


def test_everything_masked():
    assert spo(SCORES, batch(torch.zeros(4, 4), BASELINE)).eq(0).all()
