"""One process and two give the same gradient, weights and numbers, however the rows are spread over the ranks."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rft.distributed import start
from tests.helpers import (
    ALL_ON_ONE,
    LENGTHS,
    METHOD,
    MODEL,
    NLL,
    OPTIMIZER,
    UNEVEN,
    close,
    job,
    make_batch,
    make_strategy,
)

pytestmark = pytest.mark.slow


def spoilt():
    batch = make_batch()
    batch["advantages"][3, LENGTHS[3] - 1] = math.nan
    return batch


JOBS = {
    "even": job(),
    "uneven": job(UNEVEN),
    "one rank without a row": job(ALL_ON_ONE),
    "three updates, uneven": job(UNEVEN, updates=3),
    "tied": job(UNEVEN, updates=2, model=MODEL | {"tie_word_embeddings": True}),
    "blocks stay gathered": job(UNEVEN, updates=2, strategy={"reshard_after_forward": False}),
    "token mean": job(UNEVEN, algorithm=METHOD | {"aggregation": {"name": "token_mean"}}),
    "groups whole on a rank": job(
        [[2, 3], [0, 1, 4, 5, 6, 7]], algorithm=METHOD | {"aggregation": {"name": "group_mean"}}
    ),
    "gspo": job(UNEVEN, algorithm=METHOD | {"loss": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.3}, "terms": {}}),
    "critic": job(UNEVEN, head="value", updates=3),
    "critic, one rank without a row": job(ALL_ON_ONE, head="value", updates=2),
    "padded": job(UNEVEN, updates=2, actor={"packing": False}),
    "padded, one rank without a row": job(ALL_ON_ONE, actor={"packing": False}),
    "shared prompts": job(UNEVEN, updates=2, actor={"share_prefix": True}, batch=make_batch(prompt=2)),
    "twenty steps of SFT": job(UNEVEN, algorithm=NLL, updates=20),
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks, perform):
    """What two processes make of every job."""
    others = {
        "bfloat16": job(UNEVEN, strategy={"dtype": "bfloat16"}),
        "spoilt": job(UNEVEN, batch=spoilt()),  # row 3 is the only one of rank zero
        "restored": job(UNEVEN, state=perform(job(updates=2))["state"]),
    }
    return on_two_ranks(JOBS | others)


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_do_what_one_does(name, perform, two_ranks):
    one, two = perform(JOBS[name]), two_ranks[name]
    tolerance = 1e-5 if JOBS[name]["updates"] == 1 else 5e-5
    close(two["gradient"], one["gradient"], tolerance)
    close(two["weights"], one["weights"], 1e-5)
    for mine, theirs in zip(one["numbers"], two["numbers"], strict=True):
        for numbers in (mine, theirs):
            assert numbers.pop("prefix/shared", 1.0) > 0.0
            assert (numbers.pop("padding/waste") > 0.0) is ("padded" in name)
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
    norm = next(name for name in one["numbers"][0] if name.endswith("grad_norm"))
    assert two["numbers"][0][norm] == pytest.approx(one["numbers"][0][norm], rel=1e-5)
    torch.testing.assert_close(two["column"], one["column"], rtol=1e-4, atol=1e-5)


def test_twenty_steps_of_sft_have_the_same_losses(perform, two_ranks):
    losses = [numbers["loss/nll"] for numbers in perform(JOBS["twenty steps of SFT"])["numbers"]]
    found = [numbers["loss/nll"] for numbers in two_ranks["twenty steps of SFT"]["numbers"]]
    assert losses[-1] < 0.9 * losses[0]
    assert found == pytest.approx(losses, rel=1e-5)


def test_the_norm_is_that_of_the_whole_gradient(perform):
    one = perform(job())
    total = math.sqrt(sum(float(grad.double().square().sum()) for grad in one["gradient"].values()))
    assert one["numbers"][0]["grad_norm"] == pytest.approx(total, rel=1e-5)
    assert total > OPTIMIZER["max_grad_norm"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_stays_close_and_keeps_float32_weights(perform, two_ranks, ranks):
    exact = perform(JOBS["uneven"])
    found = perform(job(UNEVEN, strategy={"dtype": "bfloat16"})) if ranks == 1 else two_ranks["bfloat16"]
    assert {tensor.dtype for tensor in found["weights"].values()} == {torch.float32}
    assert {tensor.dtype for tensor in found["gradient"].values()} == {torch.float32}
    mine, theirs = (torch.cat([g.flatten() for g in r["gradient"].values()]) for r in (found, exact))
    assert 1e-6 < (mine - theirs).norm() / theirs.norm() < 0.05
    for name in ("loss/ppo_clip", "loss/kl", "entropy", "grad_norm"):
        assert found["numbers"][0][name] == pytest.approx(exact["numbers"][0][name], rel=0.05, abs=0.02)


def test_every_rank_sees_every_weight(perform, two_ranks):
    names = perform(JOBS["tied"])["names"][0]
    assert "lm_head.weight" in names and len(names) == len(set(names))
    assert two_ranks["tied"]["names"] == [names, names]


def test_a_divergence_stops_every_rank_and_is_named_where_it_is(two_ranks):
    assert two_ranks["spoilt"]["suspects"] == [{"advantages": [0]}, {}]


def test_a_state_of_one_process_goes_on_on_two(perform, two_ranks):
    one = perform(job(updates=3))
    close(two_ranks["restored"]["weights"], one["weights"])
    assert two_ranks["restored"]["numbers"][0]["grad_norm"] == pytest.approx(one["numbers"][2]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["three updates, uneven", "tied", "critic"])
def test_a_state_of_two_processes_goes_on_on_one(perform, two_ranks, name):
    before = JOBS[name]
    found = perform(before | {"state": two_ranks[name]["state"], "updates": 1})
    expected = perform(before | {"updates": before["updates"] + 1})
    close(found["weights"], expected["weights"])
    close(found["gradient"], expected["gradient"], 5e-5)


@pytest.fixture
def network():
    strategy = make_strategy(start("cpu"))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    strategy.shard(module, [module[0]])
    return strategy, module


def test_on_one_process_full_tensors_share_storage(network):
    strategy, module = network
    found = dict(strategy.full_tensors(module.state_dict().items()))
    assert list(found) == list(module.state_dict())
    with torch.no_grad():
        module[0].weight.fill_(7.0)
    assert (found["0.weight"] == 7.0).all()
    assert found["0.weight"].data_ptr() == module[0].weight.to_local().data_ptr()
    assert type(found["0.weight"]) is torch.Tensor


def test_one_process_divides_no_gradient(network):
    """FSDP2 would, by 1, in a pass over all gradients of a block."""
    _, module = network
    called = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.add(str(function))
            return function(*args, **kwargs or {})

    states = torch.randn(5, 3)
    with Calls():
        module(states).sum().backward()
    assert module[0].weight.grad is not None and "aten.div.Tensor" not in called


def test_a_small_gradient_is_not_clipped(network):
    strategy, module = network
    module(torch.randn(5, 3)).square().sum().backward()
    before = [p.grad.full_tensor().clone() for p in module.parameters()]
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in before))
    assert float(strategy.clip_grad_norm(module.parameters(), 2 * norm)) == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close([p.grad.full_tensor() for p in module.parameters()], before)
    strategy.clip_grad_norm(module.parameters(), norm / 4)
    torch.testing.assert_close(
        [p.grad.full_tensor() for p in module.parameters()], [grad / 4 for grad in before], rtol=1e-4, atol=1e-7
    )
