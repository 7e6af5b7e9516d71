"""Jobs of jobs.py on one process and on two."""

from pathlib import Path

import pytest
import torch

from rft.distributed import start
from tests.strategy import updates_on_ranks


@pytest.fixture(scope="session")
def perform():
    """Performs a job on this process alone."""
    torch.set_num_threads(1)
    return lambda job: updates_on_ranks.perform(job, start("cpu"))


@pytest.fixture(scope="session")
def on_two_ranks(torchrun, tmp_path_factory):
    """Performs jobs under one torchrun; returns what rank zero wrote."""

    def run(jobs):
        folder = tmp_path_factory.mktemp("two_ranks")
        torch.save(jobs, folder / "jobs.pt")
        torchrun(Path(updates_on_ranks.__file__), folder / "jobs.pt", folder / "results.pt")
        return torch.load(folder / "results.pt", weights_only=False)

    return run
