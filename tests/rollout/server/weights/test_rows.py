"""The rows of a rank that does not see the folder, as rank 0 receives them and writes them into a file."""

import pytest
import torch
from safetensors import safe_open

from rft.rollout.server.remote.rft_receiver import WHOLE
from rft.rollout.server.weights.rows import Outgoing, Rows, message_size, received, stored, write_rows
from rft.rollout.server.weights.store import WeightStore


def rows_of(tensors, first, last):
    """Rows of tensors in bytes."""
    found = {}
    for name, tensor in tensors.items():
        part = tensor[first:last]
        start = tensor[:first].nbytes
        found[name] = Rows(tensor.dtype, list(tensor.shape), start, part.reshape(-1).view(torch.uint8).clone())
    return found


def tensors():
    torch.manual_seed(0)
    return {
        "a": torch.randn(5, 3),
        "b": torch.randn(5, 2, 2).bfloat16(),
        "c": torch.arange(5),
        "d": torch.ones(5).bool(),
    }


def sent(new, old, kept):
    """What rank 0 receives of rows 2 to 4 of rank 1, and their message."""
    own, other = rows_of(new, 0, 2), rows_of(new, 2, 5)
    before = {name: rows.data for name, rows in rows_of(old, 2, 5).items()} if kept is not None else {}
    ranks = [Outgoing.of(own, {}), Outgoing.of(other, before)]
    parts = [outgoing.parts for outgoing in ranks]
    message = ranks[1].message(other)
    assert len(message) == message_size(own, parts[1])
    return received(message, own, parts, 1, kept), message, parts


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert (found[name].dtype, found[name].shape, found[name].first) == (rows.dtype, rows.shape, rows.first)
        assert torch.equal(found[name].data, rows.data), name


def test_rows_are_sent_whole_where_nothing_was_sent_before(tmp_path):
    found, message, parts = sent(tensors(), tensors(), None)
    same(found, rows_of(tensors(), 2, 5))
    assert len(message) == 48 + 32 + 32 + 16, "36, 24, 24 and 3 bytes in steps of 16"
    assert {part.changed for part in parts[1].values()} == {WHOLE}
    ranks = [rows_of(tensors(), 0, 2), found]
    write_rows(tmp_path / "file", ranks, True)
    with safe_open(tmp_path / "file", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors().items())
    assert stored("file", "a", ranks[0]["a"], parts).parts == [24, 36]


def test_changed_elements_are_put_into_the_rows_of_the_version_before(tmp_path):
    kept = WeightStore(tmp_path / "weights", None).write(0, tensors().items())
    new = tensors()
    new["a"][0, 0] = 1.0  # of rank 0
    new["a"][3, 1], new["b"][2, 0, 1], new["d"][4] = 2.0, 3.0, False
    found, message, parts = sent(new, tensors(), kept)
    same(found, rows_of(new, 2, 5))
    # an element of 36 bytes of `a` and one of 24 of `b`; none of `c`; of `d` with its 3 bytes all is less
    assert [part.changed for part in parts[1].values()] == [1, 1, 0, WHOLE]
    assert len(message) == 16 * (2 + 2 + 0 + 1)


def test_rows_of_a_version_that_cannot_be_read_are_an_error_that_names_the_file(tmp_path):
    kept = WeightStore(tmp_path / "weights", None).write(0, tensors().items())
    [path] = kept.folder.glob("*.safetensors")
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        sent(tensors(), tensors(), kept)
