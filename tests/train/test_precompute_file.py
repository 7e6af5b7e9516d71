"""The file of precomputed log-probabilities: a changed byte is found."""

import random

import pytest
import torch

from rft.actor.base import ModelContext
from rft.actor.reference import PrecomputedReference, damage
from rft.data.encode.tokenizer import characters
from rft.distributed import start
from tests.helpers import make_strategy


def reference_of(file):
    world = start("cpu")
    context = ModelContext("reference", world, make_strategy(world), characters(alphabet="a"), 0)
    return PrecomputedReference(context, None, True, file)


@pytest.fixture
def file(tmp_path, disk_calls):
    """A file of three rows, written by a reference."""
    reference = reference_of(tmp_path / "ref_logprobs.pt")
    assert reference.problem == "is gone" and not reference.complete
    disk_calls.clear()
    reference.write({bytes([row]) * 16: torch.arange(40.0) + row for row in range(3)})
    assert reference.complete
    return reference.file


def test_a_whole_file_is_read(file):
    assert damage(file) is None
    again = reference_of(file)
    assert again.complete and again._rows == {bytes([row]) * 16: (40 * row, 40 * row + 40) for row in range(3)}


def test_its_content_is_on_the_disk_before_its_name(file, disk_calls):
    partial = file.with_name(".ref_logprobs.pt.partial")
    assert disk_calls == [("sync", str(partial)), ("rename", str(file)), ("sync", str(file.parent))]


def test_every_changed_byte_is_found_or_changes_no_number(file):
    """The bytes between the tensors hold nothing that is read."""
    content, kept, draw = file.read_bytes(), torch.load(file), random.Random(0)
    numbers = content.index(kept["logprobs"].numpy().tobytes())
    places = [*range(numbers, numbers + 480), *draw.sample(range(len(content)), 300)]
    found = 0
    for at in places:
        changed = bytearray(content)
        changed[at] ^= draw.randrange(1, 256)
        file.write_bytes(changed)
        if damage(file) is None:
            assert at not in range(numbers, numbers + 480)
            read = torch.load(file, mmap=True)
            assert all(torch.equal(read[name], kept[name]) for name in ("keys", "ends", "logprobs"))
        else:
            found += 1
    assert found > 480
