"""Two ranks that compute each sequence together do what one process does, rows longer than a rank's cap included."""

import pytest
from transformers import AutoConfig

from rft.distributed import start
from rft.strategy.parallel.context import ContextParallel
from tests.actor.packing.kernels.references import KERNELS
from tests.helpers import (
    ALL_ON_ONE,
    DISTILL,
    EVEN,
    MODEL,
    SMALL,
    UNEVEN,
    close,
    job,
    make_actor,
    make_batch,
    make_strategy,
)
from tests.strategy.updates_on_ranks import with_teacher

TOGETHER = {"context_parallel": 2}
SINKS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
WINDOWED = SMALL | {"model_type": "mistral", "sliding_window": 4}
JOBS = {
    "even": job(EVEN, strategy=TOGETHER),
    "uneven": job(UNEVEN, strategy=TOGETHER, updates=2),
    "all rows on one rank": job(ALL_ON_ONE, strategy=TOGETHER, updates=2),
    "shared prompts": job(
        [[2, 3], [0, 1, 4, 5, 6, 7]], strategy=TOGETHER, actor={"share_prefix": True}, batch=make_batch(prompt=2)
    ),
    "critic": job(UNEVEN, strategy=TOGETHER, head="value", updates=2),
    "one head for both ranks": job(UNEVEN, strategy=TOGETHER, model=MODEL | {"num_key_value_heads": 1}),
    "sliding window": job(UNEVEN, strategy=TOGETHER, model=WINDOWED),
    "sinks": job(UNEVEN, strategy=TOGETHER, model=SMALL | SINKS),
    "teacher": job(UNEVEN, strategy=TOGETHER, algorithm=DISTILL, batch=with_teacher(make_batch())),
    "recomputed": job(UNEVEN, strategy=TOGETHER | {"activation_checkpointing": "full"}),
    "compiled": job(UNEVEN, strategy=TOGETHER | {"compile": True}),
}
# Sinks, windows, groups of query heads and a shared prefix at once; one head of keys for both ranks.
SHARED = {"actor": {"share_prefix": True}, "batch": make_batch(prompt=2)}
JOBS |= {
    f"{kernel}: {name}": job(shares, strategy=TOGETHER, kernel=kernel, model=model, **options)
    for kernel in KERNELS
    for name, shares, model, options in (
        ("sinks and shared prompts", [[2, 3], [0, 1, 4, 5, 6, 7]], SMALL | SINKS, SHARED),
        ("one head of keys", UNEVEN, WINDOWED | {"num_key_value_heads": 1}, {}),
    )
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks):
    halved = {"rows of more tokens than a rank takes": job(UNEVEN, strategy=TOGETHER, cap=10)}
    half = {"bfloat16": job(UNEVEN, strategy=TOGETHER | {"dtype": "bfloat16"})}
    return on_two_ranks(JOBS | halved | half)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOBS, "rows of more tokens than a rank takes"])
def test_two_ranks_together_do_what_one_does(name, perform, two_ranks):
    given = JOBS.get(name) or job(UNEVEN)
    alone = {key: value for key, value in given.items() if key != "kernel"}  # by sdpa
    one, two = perform(alone | {"strategy": {}}), two_ranks[name]
    close(two["gradient"], one["gradient"], 1e-5 if given["updates"] == 1 else 5e-5)
    close(two["weights"], one["weights"], 5e-5 if "kernel" in given else 1e-5)  # Adam enlarges small differences
    for mine, theirs in zip(one["numbers"], two["numbers"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
    assert (two["column"] - one["column"]).abs().max() < 1e-5


@pytest.mark.slow
def test_bfloat16_stays_close(perform, two_ranks):
    one, two = perform(job(UNEVEN)), two_ranks["bfloat16"]
    assert two["numbers"][0]["grad_norm"] == pytest.approx(one["numbers"][0]["grad_norm"], rel=0.05)


def test_what_ranks_cannot_compute_together_is_refused():
    world = start("cpu")
    with pytest.raises(ValueError, match=r"^strategy\.context_parallel=2 does not divide the 1 processes"):
        make_strategy(world, context_parallel=2)
    strategy = make_strategy(world)
    strategy.context = object.__new__(type("Three", (ContextParallel,), {"size": 3}))
    with pytest.raises(ValueError, match=r"context_parallel=3 does not divide the 4 attention heads of actor"):
        make_actor(world, strategy, model_config=MODEL)
    with pytest.raises(ValueError, match=r"^strategy\.context_parallel=3 .* set actor\.packing=true"):
        make_actor(world, strategy, model_config=MODEL, packing=False)


def test_layers_that_ranks_cannot_share_are_refused():
    message = r"^strategy\.context_parallel=1: actor is a qwen3_next, whose linear attention ranks cannot"
    with pytest.raises(ValueError, match=message):
        ContextParallel(start("cpu"), 1).check_model(AutoConfig.for_model("qwen3_next"), True, "actor")
