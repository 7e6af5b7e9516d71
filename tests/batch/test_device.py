"""Columns that are written part by part, and rows that are copied with all that they have."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from rft.batch import device as module
from rft.batch.device import HostColumns, one_ahead, rows_to_device, to_device, to_host
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


class Stream:
    """A stream of a GPU that records for which other stream it waits."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


def copies(count, calls):
    for number in range(count):
        calls.append(f"copies {number}")
        yield number


def test_each_item_is_copied_before_the_one_before_it_is_computed():
    calls = []
    for number in one_ahead(copies(3, calls), CPU):
        calls.append(f"computes {number}")
    assert calls == ["copies 0", "copies 1", "computes 0", "copies 2", "computes 1", "computes 2"]
    assert list(one_ahead(iter(()), CPU)) == []


def test_on_a_gpu_a_second_stream_copies_and_the_first_one_waits_for_no_later_copy(monkeypatch):
    calls = []
    compute, side = Stream("compute", calls), Stream("copy", calls)

    @contextmanager
    def within(stream):
        assert stream is side
        calls.append("(")
        yield
        calls.append(")")

    monkeypatch.setattr(module, "copy_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", within)
    for number in one_ahead(copies(2, calls), torch.device("cuda")):
        calls.append(f"computes {number}")
    begins = ["copy waits for compute", "("]
    assert calls == [
        *(*begins, "copies 0", ")", "compute waits for copy"),
        *(*begins, "copies 1", ")", "computes 0", "compute waits for copy"),
        *(*begins, ")", "computes 1"),
    ]


def test_an_error_in_the_loop_ends_the_copies_and_drops_the_next_item():
    alive = []

    def tensors():
        try:
            for number in range(3):
                made = torch.full((2,), float(number))
                alive.append(weakref.ref(made))
                yield made
                del made
        finally:
            alive.append("closed")

    def loop():
        for item in one_ahead(tensors(), CPU):
            raise ValueError(f"item {item[0]:.0f}")

    with pytest.raises(ValueError, match="item 0") as found:
        loop()
    del found
    assert alive.pop() == "closed"
    assert [reference() for reference in alive] == [None, None]


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("kind", "asked"), [(OnGPU, True), (torch.Tensor, False)])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_for_the_host_is_pinned_where_a_gpu_writes_it(pinned, kind, asked, monkeypatch):
    """No GPU is here, so no memory can be pinned: what torch is asked for is recorded."""
    calls, empty = [], torch.empty

    def record(*given, pin_memory, **options):
        calls.append(pin_memory)
        return empty(*given, **options)

    monkeypatch.setattr(torch, "empty", record)
    numbers = torch.arange(6.0).view(2, 3).T
    found = to_host(numbers.as_subclass(kind), pinned)
    assert calls == [asked and pinned]
    assert found.is_contiguous() and found.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found.data_ptr() != numbers.data_ptr()
