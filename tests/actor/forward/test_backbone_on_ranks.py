"""Two ranks do what one does where only some rows have media, without a deadlock."""

from pathlib import Path

import pytest
import torch

from rft.distributed import start
from tests.actor.forward.media_on_ranks import CASES, perform
from tests.helpers import close

# A softmax over keys hardly depends on a bias that all have: of some gradients Adam divides little more than rounding.
NO_GRADIENT = ("k_proj.bias", ".k.bias", ".qkv.bias")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return perform(start("cpu"), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(torchrun, tmp_path_factory):
    results = tmp_path_factory.mktemp("two") / "results.pt"
    torchrun(Path(__file__).parent / "media_on_ranks.py", results)
    return torch.load(results, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_does(name, one_rank, two_ranks):
    one, two = one_rank[name], two_ranks[name]
    torch.testing.assert_close(two["columns"], one["columns"], rtol=0, atol=1e-5)
    assert (one["columns"] != 0).any()
    for expected, numbers in zip(one["numbers"], two["numbers"], strict=True):
        for number in ("loss/nll", "grad_norm"):
            assert numbers[number] == pytest.approx(expected[number], rel=1e-4), number
    keys = {key for key in one["weights"] if key.endswith(NO_GRADIENT)}
    rest = one["weights"].keys() - keys
    close({k: two["weights"][k] for k in rest}, {k: one["weights"][k] for k in rest}, 2e-4)
