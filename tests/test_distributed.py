"""How a process joins a run, what FSDP2 sets in torch before, and the collectives on one process and on two."""

import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rft
from rft import distributed, waits
from rft.distributed import _waiting_for_ranks, check_nccl, fresh_part, start
from tests.conftest import SOON_S
from tests.helpers import strategy_options
from tests.ranks.forked import run_on_ranks

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


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


def test_each_start_of_the_ranks_has_a_part_of_the_store_of_its_own(monkeypatch):
    """torchrun keeps the store when it starts the ranks again."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def ask(rank):
        return fresh_part(dist.TCPStore("127.0.0.1", server.port, is_master=False), rank, 3)

    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            parts = list(threads.map(ask, range(3)))
        assert [part.compare_set("failure", "", "") for part in parts] == [b""] * 3
        parts[0].set("failure", "rank 1")
        assert [part.get("failure") for part in parts] == [b"rank 1"] * 3
    monkeypatch.setattr(distributed, "JOIN_S", 0.1)
    with pytest.raises(dist.DistStoreError, match=r"^ranks 1, 2 have not started$"):
        ask(0)


def test_cuda_without_a_device_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^strategy\.device=cuda, but this torch sees no CUDA .* strategy\.device=cpu"
    ):
        start("cuda")
    assert start("auto").device.type == "cpu"


@pytest.mark.parametrize(("local", "said"), [("0", True), ("1", True), ("2", False)])
def test_two_ranks_of_a_machine_say_that_they_wait_for_all(local, said, monkeypatch, caplog):
    names = {"RANK": f"1{local}", "LOCAL_RANK": local, "WORLD_SIZE": "24", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.01)
    deadline, before = time.monotonic() + SOON_S, {*threading.enumerate()}
    with _waiting_for_ranks("to start"):
        assert bool({*threading.enumerate()} - before) == said
        while said and not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    line = f"rank 1{local} waits for all 24 ranks of the run at m:1 to start, 0 s"
    assert caplog.messages[:1] == ([line] if said else [])


@pytest.mark.slow
def test_an_interface_that_gloo_does_not_find_is_named_with_the_variable():
    code = "from rft.distributed import start\ntry: start('cpu')\nexcept ValueError as error: print(error)"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "nope"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("gloo finds no network interface (")
    assert "GLOO_SOCKET_IFNAME=nope): set" in done.stdout


@pytest.mark.parametrize(
    ("message", "cured"),
    [
        ("NCCL error in: NCCLUtils.cpp:94, unhandled system error\nBootstrap : no socket interface found\n", True),
        ("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nout of memory", False),
        ("CUDA error: no kernel image is available", False),
    ],
)
def test_nccl_without_an_interface_is_named_with_the_variable(monkeypatch, message, cured):
    def all_sum(_):
        raise RuntimeError(message)

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    expected = "nccl finds no network interface .Bootstrap : no socket interface found; NCCL_SOCKET_IFNAME is not set"
    with pytest.raises(ValueError if cured else RuntimeError, match=expected if cured else None) as found:
        check_nccl(SimpleNamespace(all_sum=all_sum, device=torch.device("cpu")))
    assert cured or str(found.value) == message


@pytest.fixture
def join(monkeypatch):
    monkeypatch.setenv(WORKSPACE, "")  # restored afterwards
    monkeypatch.delenv(WORKSPACE)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield lambda **options: strategy_options(device="cpu", **options).join()
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_cudnn_sdp(before)


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get(WORKSPACE),
    )


def test_deterministic_refuses_kernels_that_are_not_and_ends_with_its_job(join):
    join(deterministic=True)
    assert settings() == (True, False, False, ":4096:8")
    join()
    assert settings()[:3] == (False, False, True)


def test_a_workspace_that_the_user_has_chosen_stays(join, monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    join(deterministic=True)
    assert settings()[3] == ":16:8"


def test_the_attention_of_cudnn_is_off_unless_it_is_chosen(join):
    join()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    join(cudnn_attention=True)
    assert torch.backends.cuda.cudnn_sdp_enabled()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "deaths", "runs", "ends"), [("SEGV", 1, 2, True), ("ABRT", 9, 2, False), ("", 9, 1, False)]
)
def test_a_script_of_which_a_rank_dies_in_native_code_runs_once_more(tmp_path, dies, deaths, runs, ends):
    """With a warning that has its stacks; one that raises an error does not."""
    script, log, starts = tmp_path / "script.py", tmp_path / "log", tmp_path / "starts"
    death = f"os.kill(os.getpid(), signal.SIG{dies})" if dies else "raise ValueError('no')"
    script.write_text(
        "import os, pathlib, signal\nfrom rft.distributed import leave, start\nworld = start('cpu')\n"
        f"path = pathlib.Path({str(starts)!r})\ncount = world.decide(lambda: path.write_text(path.read_text() + 'x'))\n"
        f"if world.rank == 1 and count <= {deaths}:\n    {death}\nworld.gather(0)\nleave()\n"
    )
    starts.write_text("")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert run_on_ranks(script, [], 2, log) is ends
    assert starts.read_text() == "x" * runs
    found = [str(each.message) for each in warned if "runs again" in str(each.message)]
    assert len(found) == runs - 1 and all("Fatal Python error" in text for text in found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_does_not_start_is_an_error_with_the_address(rank):
    """The other of two ranks; rank 0 listens."""
    code = "from rft import distributed; distributed.JOIN_S = 2.0; distributed.start('cpu')"
    ranks = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    root = {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | root | ranks, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ValueError: rank {rank} did not find all 2 ranks of the run at 127.0.0.1:" in done.stderr, done.stderr
    assert "within 2 s (" in done.stderr and "network between their machines" in done.stderr


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
