import pytest
import torch

from rft.rollout.engine.decoding.decoder import Rows
from rft.rollout.engine.sampling import stream


def test_rows_are_kept_in_an_order():
    deltas = torch.tensor([[4], [5], [6]])
    rows = Rows.of([2, 0, 1], [7, 8, 9], [10, 30, 20], deltas, torch.device("cpu"))
    assert len(rows) == 3 and rows.padded and rows.most == 30 and rows.live.all()
    rows.keep(torch.tensor([2, 0]))
    assert rows.numbers.tolist() == [2, 0] and len(rows) == 2
    assert rows.padding.tolist() == [1, 2] and rows.caps.tolist() == [20, 10] and rows.deltas.tolist() == [[6], [4]]
    assert torch.equal(rows.streams, stream([9, 7]))
    assert rows.padded and rows.most == 30, "of the wave"


def test_rows_without_padding():
    rows = Rows.of([0, 0], [1, 2], [3, 3], None, torch.device("cpu"))
    assert not rows.padded
    rows.keep(torch.tensor([1]))
    assert rows.deltas is None


@pytest.mark.parametrize(
    ("live", "size", "kept"),
    [
        ([1, 0, 1, 0, 1, 1], 4, [0, 4, 2, 5]),
        ([0, 0, 1, 0, 0, 1], 2, [2, 5]),
        ([1, 0, 0, 0, 1, 0], 4, [0, 4, 2, 3]),  # more rows than live ones
        ([1, 1, 0, 0, 0, 0], 2, [0, 1]),
    ],
)
def test_live_rows_take_the_places_of_ended_ones(live, size, kept):
    rows = Rows.of([0] * 6, list(range(6)), [9] * 6, None, torch.device("cpu"))
    rows.live = torch.tensor(live).bool()
    assert rows.compacted(size).tolist() == kept
