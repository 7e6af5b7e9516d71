"""Work on many rows is shared by forked processes, and its results are those of one process."""

import os
import signal
import time

import numpy as np
import pytest

from rft import waits
from rft.data import processes
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.tokenizer import characters
from rft.data.processes import CHUNK, TOKENIZERS_PARALLELISM, in_chunks
from rft.data.row_checks import check_rows
from rft.distributed import SINGLE_PROCESS

ROWS = [{"prompt": "1" * (1 + number % 9)} for number in range(2 * CHUNK + 5)]


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(processes, "FORKED", 2 * CHUNK)
    monkeypatch.setattr(processes, "cores", lambda: 2)


def test_chunks_are_worked_on_in_order_by_other_processes(forked, monkeypatch):
    def work(numbers):
        return os.getpid(), numbers, os.environ[TOKENIZERS_PARALLELISM]

    monkeypatch.setenv(TOKENIZERS_PARALLELISM, "true")
    found = in_chunks("rows", 2 * CHUNK + 5, work)
    parts = [range(CHUNK), range(CHUNK, 2 * CHUNK), range(2 * CHUNK, 2 * CHUNK + 5)]
    assert [numbers for _, numbers, _ in found] == parts
    assert os.getpid() not in {process for process, _, _ in found}
    assert {parallel for _, _, parallel in found} == {"false"} and os.environ[TOKENIZERS_PARALLELISM] == "true"
    few = in_chunks("rows", 2 * CHUNK - 1, lambda numbers: (os.getpid(), numbers.stop))
    assert few == [(os.getpid(), CHUNK), (os.getpid(), 2 * CHUNK - 1)] and in_chunks("rows", 0, work) == []


def test_the_first_error_is_raised(forked):
    def work(numbers):
        if numbers.start:
            raise ValueError(f"row {numbers.start}")

    with pytest.raises(ValueError, match=rf"^row {CHUNK}$"):
        in_chunks("rows", 2 * CHUNK + 5, work)


def test_a_process_that_is_killed_is_reported(forked):
    with pytest.raises(RuntimeError, match=r"one of 2 processes that read the rows has ended.*run on fewer cores"):
        in_chunks("rows", 2 * CHUNK, lambda numbers: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_does_not_answer_is_ended_and_its_rows_are_named(forked, monkeypatch, caplog):
    monkeypatch.setattr(processes, "CHUNK_S", 0.3)
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.05)
    monkeypatch.setattr(waits, "_due", {})
    rows = f"rows {CHUNK + 1} to {2 * CHUNK}"
    with pytest.raises(RuntimeError, match=rf"have not done {rows} within 0\.3 s; run on fewer cores"):
        in_chunks("counting", 2 * CHUNK, lambda numbers: time.sleep(600 * (numbers.start > 0)))
    assert f"counting: the run waits for the processes that read {rows}, 0 s" in caplog.messages


def test_a_timeout_of_the_work_is_its_own(forked):
    def work(numbers):
        raise TimeoutError("the disk")

    with pytest.raises(TimeoutError, match=r"^the disk$"):
        in_chunks("rows", 2 * CHUNK, work)


def test_counts_and_checks_are_those_of_one_process(forked):
    lengths = Lengths(SINGLE_PROCESS, Encoder(characters(alphabet="12"), "none", None), None)
    assert np.array_equal(lengths.prompts(ROWS), [len(row["prompt"]) for row in ROWS])

    def check(row):
        if len(row["prompt"]) == 9:
            raise ValueError("nine")

    said = r"^row 9: nine \(other rows that fail: 227, the first at row 18, row 27, row 36, row 45, row 54\)$"
    with pytest.raises(ValueError, match=said):
        check_rows(ROWS, check)
    with pytest.raises(ValueError, match=rf"^row {2 * CHUNK + 1}: the prompt is empty"):
        lengths.prompts([*ROWS[: 2 * CHUNK], {"prompt": ""}])


def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(processes.sys, "platform", "linux")
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda process: {*range(12)}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes.cores() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert processes.cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert processes.cores() == 2
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    assert processes.cores() == 1
