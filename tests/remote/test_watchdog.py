"""A rank that raises, dies or hangs ends the others, which name it and where they waited; a slow one does not."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rft
from rft.distributed import PeerError, Wait, start
from rft.remote.watchdog import Beat, Watchdog, from_collective, lost_connection, stack_of, waited_for, where
from tests.conftest import SOON_S

SCRIPT = Path(__file__).parent / "watchdog_on_ranks.py"


def run_ranks(kind, ranks, dead_after, timeout=60, folder=""):
    """Exit statuses and errors of all ranks but 1, and the seconds until the last ended; processes without torchrun."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    root = {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), kind, str(dead_after), str(timeout), str(folder)]
    processes = [
        subprocess.Popen(
            command, env=os.environ | root | shared | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    began = time.monotonic()
    try:
        others = [process.communicate(timeout=5 * SOON_S)[1] for process in processes[:1] + processes[2:]]
        seconds = time.monotonic() - began
    finally:
        processes[1].kill()
    return [process.returncode for process in processes[:1] + processes[2:]], others, seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "dead_after", "text"),
    [
        ("raise", 3, 200, "data.train: ${oc.env:RFT_TEST_FILE} is damaged"),
        ("kill", 2, 200, "its process ended without an error message"),
        ("kill", 3, 200, "its process ended without an error message"),
        ("stop", 3, 5, "it gives no sign of life for 5 s (faults.dead_after_s)"),
    ],
)
def test_the_others_end_and_name_the_rank_and_the_collective(kind, ranks, dead_after, text):
    codes, said, seconds = run_ranks(kind, ranks, dead_after)
    assert codes == [1] * (ranks - 1) and seconds < 3 * SOON_S  # three processes start
    for rank, stderr in zip([0, 2], said, strict=False):
        expected = f"rank 1 failed first: {text}; rank {rank} waited in `gather` of main (watchdog_on_ranks.py:"
        assert expected in stderr, stderr


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_place_after_the_long_timeout():
    codes, said, seconds = run_ranks("hang", 2, dead_after=60, timeout=5)
    assert codes == [1] and 5 < seconds < 2 * SOON_S
    place = r"`gather` of main \(watchdog_on_ranks\.py:\d+\)"
    assert re.search(
        rf"rank 1 failed first: rank 0 waited \d+ s in {place} for rank 1, which is at hang "
        rf"\(watchdog_on_ranks\.py:\d+\) \(faults\.collective_timeout_s=5\); rank 0 waited in {place}",
        said[0],
    ), said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("forward", r"\w+ \(rft/actor/forward/backbone\.py:\d+\) during the forward pass of actor"),
        ("checkpoint", r"Checkpoints\._finish \(rft/\S+:\d+\) during the writing of the checkpoint of step 1"),
    ],
)
def test_a_rank_that_hangs_in_work_that_needs_all_ranks_is_named(kind, place, tmp_path):
    """No collective of World waits: those of a sharded model are within torch, those of a checkpoint in a thread."""
    codes, said, seconds = run_ranks(kind, 2, dead_after=60, timeout=5, folder=tmp_path)
    assert codes == [1] and 5 < seconds < 2 * SOON_S
    expected = rf"rank 1 failed first: rank 0 waited \d+ s in {place} for rank 1, which is at hang \(watchdog_on_ranks"
    assert re.search(expected, said[0]), said[0]
    if kind == "checkpoint":
        assert re.search(r"^[3-9] groups with a timeout of \{12\.0\} s", said[0], re.MULTILINE), said[0]


@pytest.mark.slow
def test_a_rank_that_is_killed_before_a_group_is_made_is_found_without_the_timeout_of_torch():
    """No connection to it is lost yet: the other rank would wait in the store for 30 minutes."""
    codes, said, _ = run_ranks("group", 2, dead_after=5, timeout=1800)
    assert codes == [1] and "rank 1 failed first: it gives no sign of life for 5 s" in said[0], said[0]
    assert "rank 0 waited in `new_group` of make_group (watchdog_on_ranks.py:" in said[0]


@pytest.mark.slow
def test_a_rank_that_hangs_before_a_group_is_made_is_named_without_the_timeout_of_torch():
    codes, said, seconds = run_ranks("lack", 2, dead_after=60, timeout=5)
    assert codes == [1] and 5 < seconds < 2 * SOON_S
    place = r"`new_group` of lack_rank \(watchdog_on_ranks\.py:\d+\)"
    assert re.search(rf"rank 0 waited \d+ s in {place} for rank 1, which is at hang \(watchdog_on", said[0]), said[0]


@pytest.mark.slow
def test_a_rank_that_is_slow_ends_nothing():
    """The first rank that waits for it names it."""
    codes, said, seconds = run_ranks("slow", 3, dead_after=6)
    assert codes == [0, 0] and seconds > 8
    line = (
        r"^rank 0 waits in `gather` of main \(watchdog_on_ranks\.py:\d+\) for rank 1, which is at slow \(\S+\), \d s$"
    )
    assert re.search(line, said[0], re.MULTILINE), said[0]
    assert "waits in" not in said[1]


def test_a_rank_is_waited_for_until_it_is_in_the_collective():
    wait = Wait()
    with wait.within("gather"):
        beats = {
            0: Beat(9, 1, "gather", "", "", True),  # is in it
            1: Beat(9, 0, "", "", "", False),  # has not begun it
            2: Beat(9, 1, "", "", "", False),  # has left it
            3: Beat(9, 2, "broadcast", "", "", True),  # is in the next one
            4: Beat(9, 0, "barrier", "", "", True),  # is in the one before
            5: Beat(9, 1, "barrier", "", "", True),  # is in another one: the ranks took different ways
        }
        assert waited_for(wait, beats) == [1, 4, 5]
        assert waited_for(wait, {rank: beats[rank] for rank in (0, 2, 3)}) == []
    with wait.during("the forward pass"):
        work = Beat(9, 1, "", "the forward pass", "", False)
        assert waited_for(wait, {0: work, 1: work._replace(blocked=True)}) == [0]
        assert waited_for(wait, {0: work._replace(blocked=True), 1: beats[1]._replace(blocked=True)}) == [1]


def test_one_process_needs_no_watchdog():
    with pytest.raises(KeyError), Watchdog(start("cpu"), 1.0, 1.0, str):
        raise KeyError
    with Watchdog(start("cpu"), 1.0, 1.0, str):
        pass


def test_the_place_is_that_of_the_caller_of_the_collective():
    assert re.fullmatch(
        r"test_the_place_is_that_of_the_caller_of_the_collective \(test_watchdog\.py:\d+\)",
        where(stack_of(threading.get_ident())),
    )
    assert where([]) == "the start of the program"

    frames = []
    start("cpu").decide(lambda: frames.extend(stack_of(threading.get_ident())[:-2]))
    assert re.fullmatch(r"`decide` of test_the_place\w+ \(test_watchdog\.py:\d+\)", where(frames))


def test_errors_of_collectives_are_told_from_others():
    gloo = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    wrapped = ValueError("step 3")
    wrapped.__cause__ = gloo
    assert lost_connection(gloo) and lost_connection(wrapped) and not lost_connection(RuntimeError("shape"))
    assert from_collective(wrapped) and from_collective(PeerError("")) and not from_collective(KeyError("x"))
