"""What tests of actors share."""

import pytest
import torch

from rft.distributed import start


@pytest.fixture(scope="module")
def world():
    torch.set_num_threads(1)
    return start("cpu")
