"""Columns that are written part by part, and rows that are copied with all that they have."""

import torch

from rft.batch.device import HostColumns, rows_to_device, to_device
from tests.helpers import make_batch

CPU = torch.device("cpu")


def test_parts_are_written_to_their_rows():
    found = HostColumns(("plain", "several", "none"), torch.Size((3, 4)), CPU)
    found.write("plain", torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found.write("several", torch.tensor([1]), torch.tensor([[[5, 6]]]))
    found.write("plain", torch.tensor([1]), torch.tensor([[7.0, 8.0, 9.0]]))
    found.write("none", torch.tensor([], dtype=torch.int64), torch.zeros(0, 1))
    found.wait()
    assert found.columns["plain"].tolist() == [[3, 4, 0, 0], [7, 8, 9, 0], [1, 2, 0, 0]]
    several = torch.zeros(3, 4, 2, dtype=torch.int64)
    several[1, 0] = torch.tensor([5, 6])
    assert found.columns["several"].equal(several)
    assert not found.columns["none"].any()


def test_rows_have_all_their_columns_on_the_device():
    batch = make_batch()
    meta = rows_to_device(batch, torch.device("meta"))
    assert set(meta.keys(True, True)) == set(batch.keys(True, True))
    for name in batch.keys(True, True):
        if isinstance(batch[name], torch.Tensor):
            assert meta[name].shape == batch[name].shape
            assert meta[name].is_meta
    assert to_device(torch.ones(2), torch.device("meta")).is_meta
