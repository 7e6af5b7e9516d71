"""Messages to servers: which tensors they hold, and what is in them."""

import pytest
import torch

from rft.rollout.server.remote import rft_receiver
from rft.rollout.server.remote.rft_receiver import WHOLE, checksum, pack, room, unpack
from rft.rollout.server.weights import buckets
from rft.rollout.server.weights.buckets import Bucket, missing_tensors
from rft.rollout.server.weights.deltas import sparse_delta
from rft.rollout.server.weights.store import WeightStore


def test_a_bucket_is_unpacked_as_it_was_packed():
    torch.manual_seed(0)
    tensors = [torch.randn(3), torch.randn(2, 5).bfloat16(), torch.tensor(True), torch.randint(9, (7,))]
    about = [(str(number), str(t.dtype)[6:], list(t.shape)) for number, t in enumerate(tensors)]
    whole = [WHOLE] * 4
    packed = pack(about, whole, ((tensor,) for tensor in tensors), torch.empty(128, dtype=torch.uint8))
    assert room(about, whole) == ([0, 16, 48, 64], 64 + 64 + 8)
    for tensor, (_, found) in zip(tensors, unpack(about, whole, packed, None), strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_elements_alone_make_the_same_bits(dtype):
    old = torch.tensor([1.0, torch.nan, 0.0, *range(17)]).to(dtype)
    new = old.clone()
    new[2], new[7] = -0.0, torch.nan
    places, values = sparse_delta(new.view(4, 5), old.view(4, 5))
    assert places.tolist() == [2, 7], "whatever differs in a bit, and nothing else"
    about = [("a", str(dtype)[6:], [4, 5]), ("b", "float32", [1]), ("a", str(dtype)[6:], [4, 5])]
    changed, parts = [2, WHOLE, 0], [(places, values), (torch.ones(1),), (places[:0], values[:0])]
    assert room(about, changed)[1] == 16 + 16 + 16 + 8
    packed, copies = pack(about, changed, parts, torch.empty(56, dtype=torch.uint8)), {"a": old.view(4, 5).clone()}
    found = [tensor.clone() for _, tensor in unpack(about, changed, packed, copies)]
    assert found[1].item() == 1.0 and copies["b"].item() == 1.0
    for tensor in (found[0], found[2], copies["a"]):
        assert tensor.shape == (4, 5) and torch.equal(tensor.view(-1).view(torch.int16), new.view(torch.int16))


def test_a_checksum_tells_what_is_flipped_moved_or_lost(monkeypatch):
    monkeypatch.setattr(rft_receiver, "CHUNK", 8)
    data = torch.randint(256, (16 * 9,), generator=torch.manual_seed(0)).to(torch.uint8)
    words = [int.from_bytes(bytes(data[8 * n : 8 * n + 8].tolist()), "little", signed=True) for n in range(18)]
    total = 0
    for chunk in (words[start : start + 8] for start in range(0, 18, 8)):
        total = total * rft_receiver.FACTOR
        total += sum((word ^ word >> 32) * (2 * place + 1) * rft_receiver.FACTOR for place, word in enumerate(chunk))
    assert checksum(data).item() % 2**64 == total % 2**64
    others = {checksum(data ^ torch.eye(144, dtype=torch.uint8)[place] * 128).item() for place in range(144)}
    both = checksum(data ^ (torch.eye(144, dtype=torch.uint8)[[7, 15]].sum(0) * 128).to(torch.uint8)).item()
    assert len(others | {both, checksum(data).item(), checksum(data.roll(8)).item()}) == 147


def test_layers_travel_whole_and_in_buckets_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 100)
    names = ["embed.weight", "layers.0.q", "layers.0.k", "layers.1.mlp.up", "layers.1.mlp.down", "head.weight"]
    tensors = {name: torch.full((10,), float(place)) for place, name in enumerate(names)} | {"big": torch.ones(99)}
    weight_store = WeightStore(tmp_path / "w", None)
    first = weight_store.write(1, tensors.items())
    weight_store.keep(first)
    assert [bucket.names for bucket in missing_tensors(first, None)] == [names[:2], names[2:4], names[4:], ["big"]]
    second = weight_store.write(2, (tensors | {"layers.1.mlp.down": torch.zeros(10)}).items())
    [bucket] = missing_tensors(second, first)
    assert sorted(bucket.names) == ["layers.1.mlp.down", "layers.1.mlp.up"]
    assert isinstance(bucket, Bucket) and bucket.about()[0][1:] == ("float32", [10])
    assert {name: tensor[0].item() for name, tensor in zip(bucket.names, bucket.tensors(), strict=True)} == {
        "layers.1.mlp.up": 3.0, "layers.1.mlp.down": 0.0,
    }  # fmt: skip
    assert missing_tensors(second, second) == []
