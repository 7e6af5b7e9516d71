"""The collectives on one process and on two."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rft.distributed import start


def test_one_process_is_a_world():
    world = start("cpu")
    assert (world.rank, world.size, world.mesh.size(), str(world.device)) == (0, 1, 1, "cpu")
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    total = world.all_sum(given)
    total += 1
    assert given.tolist() == [1.0, 2.0] and not total.requires_grad
    thing = object()
    assert world.gather(thing) == [thing]
    data = torch.tensor([7], dtype=torch.uint8)
    assert world.gather_bytes(data, [1]) == [data]
    [parcel] = world.exchange([thing])
    assert parcel is thing
    assert world.decide(lambda: thing) is thing


def test_an_error_of_the_decision_is_raised():
    def refuse():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        start("cpu").decide(refuse)


def test_a_second_start_keeps_the_process_group():
    start("cpu")
    group = dist.group.WORLD
    assert start("auto" if not torch.cuda.is_available() else "cpu").size == 1
    assert dist.group.WORLD is group


def test_cuda_without_a_device_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^strategy\.device=cuda, but this torch sees no CUDA .* strategy\.device=cpu"
    ):
        start("cuda")
    assert start("auto").device.type == "cpu"


@pytest.mark.slow
def test_two_processes(torchrun, tmp_path):
    torchrun(Path(__file__).parent / "ranks" / "collectives.py", tmp_path)
    ranks = torch.load(tmp_path / "found.pt")
    for rank, found in enumerate(ranks):
        assert found.pop("travelled") < 2000, "what stays does not travel"
        for source, (sender, receiver, rows) in enumerate(found.pop("exchanged")):
            assert (sender, receiver, rows.shape) == (source, rank, (rank, 2))
            assert rows.signbit().all(), "-0 is not 0: the bits are the same"
        assert found == {
            "rank": rank,
            "size": 2,
            "mesh": 2,
            "sum": [3.0, 30.0],
            "given": [1.0 + rank, 10.0 + 10 * rank],
            "count": 7,
            "gather": [{"rank": 0}, {"rank": 1}],
            "bytes": [[], [7]] if rank == 0 else [],
            "decided": "chosen by 0",
            "asked": [0] if rank == 0 else [],
            "refused": "seed: no",
            "again": rank,
            "stays": True,
        }
    assert (tmp_path / "failure1").read_text() == "KeyError: 'difficulty'"
    first = "PeerError: rank 1 failed first: KeyError: 'difficulty'; rank 0 waited in `gather` of failure ("
    assert (tmp_path / "failure0").read_text().startswith(first), "not that gloo lost a connection"
