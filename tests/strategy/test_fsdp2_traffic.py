"""What the ranks send each other, and in which dtype, under each option; and that they learn the same all the same."""

import pytest
import torch

from rft.distributed import start
from tests.helpers import UNEVEN, close, job, make_strategy

GROUPS, MICRO_BATCHES = 3, 3  # two blocks and the root; of rank one, which has more rows
WHOLE = 22704  # bytes of all weights
OFFLOADED = {
    "offloaded": {"activation_offload": True},
    "offloaded, recomputed": {"activation_offload": True, "activation_checkpointing": "full"},
}
JOBS = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "whole": {"accumulate": "whole"},
    "whole and kept": {"accumulate": "whole", "reshard_after_forward": False},
    "replicas": {"replicas": 2},
    "replicas, whole": {"replicas": 2, "accumulate": "whole"},
    "recomputed": {"activation_checkpointing": "full"},
    "recomputed, selective": {"activation_checkpointing": "selective"},
    **OFFLOADED,
    "everything": {
        "replicas": 2,
        "accumulate": "whole",
        "reshard_after_forward": False,
        "context_parallel": 2,
        "activation_checkpointing": "full",
    },
}
ROUNDED = {
    "reduced in bfloat16": {"reduce_dtype": "bfloat16"},
    "replicas, reduced in bfloat16": {"reduce_dtype": "bfloat16", "replicas": 2},
    "float16": {"dtype": "float16"},
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks, perform):
    """What two processes make of every job."""
    jobs = {name: job(UNEVEN, updates=2, strategy=options) for name, options in (JOBS | ROUNDED).items()}
    jobs["float16"]["updates"] = 12
    jobs["restored as replicas"] = jobs["replicas"] | {"state": two_updates(perform)["state"], "updates": 1}
    return on_two_ranks(jobs)


def two_updates(perform, **strategy):
    return perform(job(updates=2, strategy=strategy))


@pytest.fixture(scope="module")
def alone(perform):
    """What one process makes of the job without options."""
    return two_updates(perform)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_the_ranks_learn_what_one_process_learns(name, alone, two_ranks):
    one, two = alone, two_ranks[name]
    close(two["gradient"], one["gradient"], 5e-5)
    close(two["weights"], one["weights"])
    assert two["numbers"][1]["grad_norm"] == pytest.approx(one["numbers"][1]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_one_process_learns_the_same_with_every_option(name, perform, alone):
    options = {key: value for key, value in JOBS[name].items() if key not in ("replicas", "context_parallel")}
    close(two_updates(perform, **options)["weights"], alone["weights"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gathers", "scatters", "sums"),
    [
        ("default", MICRO_BATCHES * (2 * GROUPS - 1), MICRO_BATCHES * GROUPS, 0),  # the root stays gathered
        ("kept", GROUPS, MICRO_BATCHES * GROUPS, 0),
        ("whole", MICRO_BATCHES * (2 * GROUPS - 1), GROUPS, 0),
        ("whole and kept", GROUPS, GROUPS, 0),
        ("replicas", 0, 0, GROUPS),
        ("replicas, whole", 0, 0, GROUPS),
        ("recomputed", MICRO_BATCHES * (2 * GROUPS - 1), MICRO_BATCHES * GROUPS, 0),
    ],
)
def test_collectives_of_an_update(name, gathers, scatters, sums, two_ranks):
    expected = {"all_gather float32": gathers, "reduce_scatter float32": scatters}
    expected |= {"all_reduce float32": sums + 1}  # and the loss of the update
    assert two_ranks[name]["collectives"] == {key: count for key, count in expected.items() if count}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["default", "kept", "whole", "whole and kept", "recomputed", "recomputed, selective", *OFFLOADED],
)
def test_the_gradient_of_a_block_is_reduced_before_the_backward_of_the_block_before_has_ended(name, two_ranks):
    """So it travels while that block computes. The last reduction is that of the root."""
    reduces = ["end of block 1", "reduce_scatter", "end of block 0", "reduce_scatter", "reduce_scatter"]
    adds_up = ["end of block 1", "end of block 0"]
    others = adds_up if "whole" in name else reduces
    assert two_ranks[name]["backward"] == [*others * (MICRO_BATCHES - 1), *reduces]


@pytest.mark.slow
def test_gradients_travel_in_the_dtype_that_is_asked_for(two_ranks):
    found = two_ranks["reduced in bfloat16"]["collectives"]
    assert found["reduce_scatter bfloat16"] == MICRO_BATCHES * GROUPS and "reduce_scatter float32" not in found
    assert found["all_gather float32"] > 0


@pytest.mark.slow
def test_replicas_do_not_add_up_in_less_than_float32(two_ranks):
    """They exchange every micro-batch then, and add up where the gradient is float32."""
    assert two_ranks["replicas, reduced in bfloat16"]["collectives"]["all_reduce bfloat16"] == MICRO_BATCHES * GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduced in bfloat16", "replicas, reduced in bfloat16"])
def test_a_rounded_sum_stays_close(name, two_ranks):
    """The first update is the same but for rounding."""
    found, exact = (two_ranks[which]["numbers"][0]["grad_norm"] for which in (name, "default"))
    assert found != exact and found == pytest.approx(exact, rel=1e-2)
    mine, theirs = (flat(two_ranks[which]["gradient"]) for which in (name, "default"))
    assert mine.dtype == torch.float32
    assert 1e-6 < (mine - theirs).norm() / theirs.norm() < 1e-2


def flat(gradient):
    return torch.cat([tensor.flatten() for tensor in gradient.values()])


@pytest.mark.slow
def test_float16_finds_its_scale_on_every_rank_alike(perform, two_ranks):
    two = two_ranks["float16"]["numbers"]
    one = perform(job(strategy={"dtype": "float16"}, updates=12))["numbers"]
    scales = [numbers["loss_scale"] for numbers in two]
    skipped = [number for number, numbers in enumerate(two) if "grad_norm" not in numbers]
    assert skipped and skipped == list(range(len(skipped))) and len(skipped) < 10
    assert scales == [2.0 ** (16 - min(number, len(skipped))) for number in range(12)]
    assert [numbers["loss_scale"] for numbers in one] == scales
    first = len(skipped)
    exact = perform(job())["numbers"][0]["grad_norm"]
    assert two[first]["grad_norm"] == pytest.approx(exact, rel=1e-2)
    assert two[-1]["loss/ppo_clip"] < two[0]["loss/ppo_clip"]
    found = two_ranks["float16"]
    assert {tensor.dtype for tensor in (found["weights"] | found["gradient"]).values()} == {torch.float32}
    assert "all_gather float16" in found["collectives"] and "reduce_scatter float32" in found["collectives"]
    assert found["state"]["scale"] == {"factor": scales[-1], "moves": True, "calm": 12 - first}


@pytest.mark.slow
def test_each_replica_holds_all_the_weights(two_ranks):
    assert two_ranks["replicas"]["held"] == [WHOLE, WHOLE]
    shards = two_ranks["default"]["held"]
    assert sum(shards) == WHOLE and max(shards) < 0.51 * WHOLE


@pytest.mark.slow
def test_a_state_of_one_process_goes_on_on_replicas_and_back(perform, two_ranks):
    three = perform(job(updates=3))
    close(two_ranks["restored as replicas"]["weights"], three["weights"])
    back = perform(job(state=two_ranks["replicas"]["state"]))
    close(back["weights"], three["weights"])


def test_replicas_must_divide_the_processes():
    with pytest.raises(ValueError, match=r"^strategy\.replicas=2 does not divide the 1 processes; choose"):
        make_strategy(start("cpu"), replicas=2)
