"""Advantages against a tracked solve rate, and against the scores of an agent."""

import json

import pytest
import torch

from rft.algorithm import ADVANTAGES
from rft.algorithm.advantage.tracker import AgentBaselines
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


def rae(scores, agents, state, all_sum=lambda tensor: tensor):
    scores = torch.as_tensor(scores, dtype=torch.float64)
    keep = torch.tensor([[0, 1, 1]]).bool().expand(len(scores), 3)
    rows = batch_of(keep, torch.arange(len(scores)), agent=torch.tensor(agents, dtype=torch.int64))
    plugin = ADVANTAGES.build({"name": "rae", "decay": 0.5}, "algorithm.advantage")
    found = plugin(scores, torch.zeros(keep.shape), rows, all_sum=all_sum, state=state)["advantages"]
    assert found[:, 1].equal(found[:, 2]) and not found[:, 0].any()
    return found[:, 1].tolist()


def test_rae_by_hand():
    """Agent 0 has two scores of mean 0.5 in the first step, agent 2 one: 0.75 * 0.5, and 0.5 * 3."""
    state = AgentBaselines()
    assert rae([1, 3, 0], [0, 2, 0], state) == [1, 3, 0]
    assert state.means == {0: 0.375, 2: 1.5}
    assert rae([1, 3, 0], [0, 2, 1], state) == [0.625, 1.5, 0]
    assert state.means == {0: 0.6875, 1: 0, 2: 2.25}
    assert state.numbers() == {"baseline_0": 0.6875, "baseline_1": 0, "baseline_2": 2.25}
    other = AgentBaselines()
    other.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert other.means == state.means


def test_the_baselines_of_agents_are_those_of_all_ranks(ranks):
    scores, agents = [1.0, 3.0, 0.0, 2.0], [0, 2, 0, 1]

    def part(world):
        state, mine = AgentBaselines(), slice(world.rank, 3 * world.rank + 1)  # one row, and three
        return [rae(scores[mine], agents[mine], state, world.all_sum) for _ in range(2)], state.means

    alone = AgentBaselines()
    steps = [rae(scores, agents, alone) for _ in range(2)]
    (first, means), (second, same) = ranks(2, part)
    assert means == same == pytest.approx(alone.means)
    for one, two, whole in zip(first, second, steps, strict=True):
        assert one + two == pytest.approx(whole)
