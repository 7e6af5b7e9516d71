"""Memory that processes share: what both see, what is left when one is killed, and handles that cannot be mapped.

Memory of a GPU is the part `ipc` of scripts/gpu_check.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft.rollout.server.remote import rft_shared_memory
from rft.rollout.server.remote.rft_shared_memory import SharedMemory, attach
from rft.rollout.server.server_api import REMOTE
from tests.rollout.server.real_servers import SHARED

OWNER = """
import json, sys, torch
from rft_shared_memory import SharedMemory
memory = SharedMemory(1000, torch.device("cpu"))
memory.data.fill_(7)
print(json.dumps(memory.handle()), flush=True)
print(int(memory.data[3]) if sys.stdin.readline() else "", flush=True)
sys.stdin.readline()
"""


def maps(handle):
    """Whether this process still maps the memory of a handle; other tests may have left some of theirs."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if rft_shared_memory.NAME in line]
    return handle["inode"] in [int(line.split()[4]) for line in lines]


@pytest.fixture
def owner():
    """A process that has memory of a thousand sevens, and its handle."""
    before = {entry.name for entry in os.scandir(SHARED)}
    environment = os.environ | {"PYTHONPATH": REMOTE}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", OWNER], **pipes) as process:
        yield process, json.loads(process.stdout.readline())
        process.kill()
    assert not [name for name in {entry.name for entry in os.scandir(SHARED)} - before if "torch" in name]


@pytest.mark.slow
def test_both_processes_see_what_one_writes_and_a_killed_owner_leaves_nothing(owner):
    process, handle = owner
    data = attach(handle)
    assert data.dtype == torch.uint8 and data.tolist() == [7] * 1000
    data[3] = 9
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "9\n"
    process.kill()
    process.wait()
    assert data[:5].tolist() == [7, 7, 7, 9, 7], "what is mapped stays until it is released"
    with pytest.raises(RuntimeError, match=r"cannot map the memory of rank 0 .*; or set rollout.*transport=group$"):
        attach(handle)
    assert maps(handle)
    del data
    assert not maps(handle)


def test_memory_is_released_with_its_last_user():
    memory = SharedMemory(100, torch.device("cpu"))
    handle = memory.handle()
    other = attach(handle)
    memory.close()
    memory.close()
    del memory
    assert maps(handle) and other.tolist() == [0] * 100
    del other
    assert not maps(handle)


def test_another_file_with_the_number_of_a_handle_is_not_mapped(tmp_path):
    """As where the server is in another container, which has processes of its own."""
    memory = SharedMemory(100, torch.device("cpu"))
    with Path(tmp_path / "log").open("w+b") as file:
        for handle in (memory.handle() | {"file": file.fileno()}, memory.handle() | {"inode": 1}):
            with pytest.raises(RuntimeError, match=r"is another file.*in one container"):
                attach(handle)
    memory.close()


def test_a_gpu_that_a_worker_does_not_see_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rft_shared_memory, "uuid_of", lambda device: f"GPU-{device.index}")
    with pytest.raises(RuntimeError, match=r"the GPU of rank 0, GPU-7, only GPU-0, GPU-1; .*or set .*transport=group"):
        attach({"device": "GPU-7", "fields": []})
