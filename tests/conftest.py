"""What tests of several folders share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rft


@pytest.fixture(scope="session")
def torchrun():
    """Runs a script on two processes of this machine, on the CPU; fails with what they said."""

    def run(script: Path, *arguments: object) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        root = str(Path(rft.__file__).parent.parent)
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        found = subprocess.run(
            [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert found.returncode == 0, found.stdout + found.stderr

    return run
