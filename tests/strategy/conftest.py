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
def on_two_ranks(on_ranks):
    """Performs jobs under one torchrun; returns what rank zero wrote."""
    return lambda jobs: on_ranks(jobs, 2)


@pytest.fixture(scope="session")
def on_ranks(torchrun, tmp_path_factory):
    """As on_two_ranks, on any number of them."""

    def run(jobs, ranks):
        folder = tmp_path_factory.mktemp("ranks")
        torch.save(jobs, folder / "jobs.pt")
        torchrun(Path(updates_on_ranks.__file__), folder / "jobs.pt", folder / "results.pt", ranks=ranks)
        return torch.load(folder / "results.pt", weights_only=False)

    return run
