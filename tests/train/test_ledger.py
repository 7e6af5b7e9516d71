"""What became of each position in the data."""

import itertools
import random

import torch
from tensordict import TensorDict

from rft.distributed import SINGLE_PROCESS
from rft.train.ledger import Ledger, add


class Draws:
    """What the ledger asks of a source."""

    def __init__(self, waiting=(), dropped=None):
        self.waiting = lambda: list(waiting)
        self.dropped = lambda: dropped or {}


def batch(groups, trains):
    """Rows of these groups; whether a token of the row trains."""
    return TensorDict(
        {
            "group": torch.tensor(groups),
            "unit": torch.arange(len(groups)),
            "loss_mask": torch.tensor([[False, train] for train in trains]),
        },
        batch_size=[len(groups)],
    )


def test_add():
    draw = random.Random(0)
    for _ in range(50):
        order = draw.sample(range(30), 20)
        spans = []
        assert all(add(spans, position) for position in order)
        assert not any(add(spans, position) for position in order)
        assert [position for first, last in spans for position in range(first, last + 1)] == sorted(order)
        assert all(one[1] + 1 < other[0] for one, other in itertools.pairwise(spans))


def test_each_position_has_what_became_of_it():
    ledger = Ledger(SINGLE_PROCESS)
    ledger.record("warmup", Draws(), batch([0, 1], [True, True]), [])
    ledger.record("train", Draws(dropped={"no signal": [2]}), batch([0, 0, 1, 1], [True, False, False, False]), [])
    ledger.record("train", Draws([6, 7], {"no signal": [5, 3]}), batch([4, 4], [True, True]), [])
    state = ledger.state_dict()
    assert state == {
        "warmup": {"trained": [[0, 1]]},
        "train": {
            "trained": [[0, 0], [4, 4]],
            "no token trains": [[1, 1]],
            "no signal": [[2, 3], [5, 5]],
            "waiting": [[6, 7]],
        },
    }
    other = Ledger(SINGLE_PROCESS)
    other.load_state_dict(state)
    other.record("train", Draws(waiting=[7]), batch([6, 4], [True, True]), [])
    found = other.state_dict()["train"]
    assert found["trained"] == [[0, 0], [4, 4], [6, 6]] and found["waiting"] == [[7, 7]]
    assert found["trained again"] == [[4, 4]]


def test_a_group_whose_rows_are_all_dropped_as_not_finite_is_not_trained():
    ledger = Ledger(SINGLE_PROCESS)
    ledger.record("train", Draws(), batch([0, 0, 1, 1, 2], [True, True, True, False, False]), [0, 2, 4])
    assert ledger.state_dict()["train"] == {
        "trained": [[0, 0]],
        "not finite": [[1, 1]],
        "no token trains": [[2, 2]],
    }


def test_a_group_without_a_score_is_apart_from_one_that_was_not_selected():
    ledger = Ledger(SINGLE_PROCESS)
    rows = batch([0, 0, 1, 1, 2, 2], [True, False, False, False, False, False])
    rows["scores"] = torch.tensor([1.0, torch.nan, torch.nan, torch.nan, torch.nan, 0.0])
    ledger.record("train", Draws(), rows, [])
    assert ledger.state_dict()["train"] == {"trained": [[0, 0]], "no score": [[1, 1]], "no token trains": [[2, 2]]}


def test_ranks_add_up(ranks):
    def record(world):
        ledger = Ledger(world)
        draws = Draws([20 + world.rank], {"no signal": [10 + world.rank]})
        ledger.record("train", draws, batch([2 * world.rank, 2 * world.rank + 1], [True, True]), [])
        return ledger.state_dict()

    expected = {"trained": [[0, 3]], "no signal": [[10, 11]], "waiting": [[20, 21]]}
    assert ranks(2, record) == [{"train": expected}] * 2
