"""Training with torchao's float8 layers, whose kernels the CPU has too, beside training in bfloat16.

Run by test_fp8.py in a process of its own, since transformers imports torchao wherever it is installed.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torchao.float8.float8_linear import Float8Linear

from rft.distributed import start
from rft.modes.train import memory_by_stage
from tests.helpers import (
    ALL,
    EVEN,
    METHOD,
    MODEL,
    NLL,
    OPTIMIZER,
    UNEVEN,
    close,
    identical,
    job,
    make_actor,
    make_batch,
    make_optimizer,
    make_strategy,
    update,
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
WIDE = MODEL | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.02}
LLAMA = WIDE | {"model_type": "llama"}
EXPERTS = WIDE | {
    "model_type": "qwen3_moe",
    "num_experts": 16,  # the router's sizes fit
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
STILL = OPTIMIZER | {"lr": 0.0, "weight_decay": 0.0}
SHAPE = [f"actor.model_config.{name}" for name in ("hidden_size=256", "intermediate_size=1024", "num_hidden_layers=4")]
KEPT = ("weights", "gradients", "optimizer")  # terms of mode=plan that stay
TRAINED = make_batch()["loss_mask"]
OPTIONS = (
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_offload": True},
    {"param_offload": "all"},
    {"optimizer_offload": True},
    {"reshard_after_forward": False, "accumulate": "whole"},
)


def sft(recipe, shares=EVEN, strategy=None, **changes):
    """A job of supervised training whose weights stay, so that its columns are those of the first update."""
    options = {"dtype": "bfloat16", "fp8": recipe} | (strategy or {})
    return job(shares, **{"model": WIDE, "algorithm": NLL, "optimizer": STILL, "strategy": options} | changes)


def gap(one, other):
    """The differences of log-probabilities of the tokens that train, in nats."""
    return (one["column"] - other["column"])[TRAINED].abs()


def cosine(one, other):
    vectors = (torch.cat([part.flatten() for part in result["gradient"].values()]) for result in (one, other))
    return float(torch.cosine_similarity(*vectors, 0))


def distance(one, other):
    """Of two gradients, relative to their norm."""
    first, second = (torch.cat([part.flatten() for part in result["gradient"].values()]) for result in (one, other))
    return float((first - second).norm() / second.norm())


def assert_close_to_bfloat16(found, plain):
    assert 1e-3 < float(gap(found, plain).mean()) < 0.02
    assert 0.99 < cosine(found, plain) < 0.9995
    assert identical(found["weights"], plain["weights"])  # names, values and float32


@pytest.fixture(scope="module")
def plain(perform):
    """Without float8, by the model."""
    models = {"wide": WIDE, "llama": LLAMA, "experts": EXPERTS}
    return {name: perform(sft(None, model=model)) for name, model in models.items()}


TWO_RANKS = {
    **{recipe: sft(recipe, UNEVEN) for recipe in RECIPES},
    "context": sft("rowwise", strategy={"context_parallel": 2}),
    "replicas": sft("rowwise", UNEVEN, strategy={"replicas": 2}),
    "experts": sft("rowwise", UNEVEN, strategy={"expert_parallel": 2}, model=EXPERTS),
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks):
    return on_two_ranks(TWO_RANKS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [WIDE, LLAMA, EXPERTS], ids=["wide", "llama", "experts"])
def test_results_are_near_those_of_bfloat16_and_not_the_same(model, recipe, perform, plain, request):
    name = request.node.callspec.id.split("-")[0]
    assert_close_to_bfloat16(perform(sft(recipe, model=model)), plain[name])


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_are_as_near_and_all_see_the_same_names(name, plain, two_ranks):
    found, expected = two_ranks[name], plain["experts" if name == "experts" else "wide"]
    assert_close_to_bfloat16(found, expected)
    assert found["names"] == expected["names"] * 2


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_of_rows_make_results_independent_of_micro_batches_and_ranks(recipe, perform, two_ranks):
    one, small = perform(sft(recipe, cap=ALL)), perform(sft(recipe, cap=20))
    for other in (small, two_ranks[recipe]):
        assert float(gap(other, one).max()) == 0.0
        assert distance(other, one) < 0.005  # that of bfloat16, which rounds the gradient of every micro-batch
    assert distance(perform(sft(None, cap=20)), perform(sft(None, cap=ALL))) > 0.001


def test_one_scale_for_all_tokens_of_a_micro_batch_makes_results_depend_on_it(perform):
    one, small = perform(sft("tensorwise", cap=ALL)), perform(sft("tensorwise", cap=20))
    assert 1e-3 < float(gap(small, one).mean()) < 0.02
    assert 0.02 < distance(small, one) < 0.15


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_update_has_a_ratio_of_one_where_scales_are_of_rows(recipe, perform):
    batch = make_batch()
    whole = perform(sft(recipe, cap=ALL))
    batch["old_logprobs"] = whole["column"]
    options = {"dtype": "bfloat16", "fp8": recipe}
    numbers = perform(job(model=WIDE, strategy=options, optimizer=STILL, batch=batch, cap=20))["numbers"][0]
    assert (numbers["kl/old"] == 0.0) is (recipe != "tensorwise")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_options_change_nothing(recipe, options, perform):
    moving = {"optimizer": OPTIMIZER, "updates": 2}
    one, other = perform(sft(recipe, **moving)), perform(sft(recipe, strategy=options, **moving))
    tolerance = 0.02 if "accumulate" in options else 0.0  # which sums gradients in another order
    close(other["gradient"], one["gradient"], tolerance)
    close(other["weights"], one["weights"], tolerance)


@pytest.mark.parametrize(
    ("head", "optimizer", "margin"),
    [
        ("lm", "adamw", 0.05),
        ("lm", "adamw_8bit", 0.05),
        ("lm", "muon", 0.05),
        ("value", "adamw", 0.25),  # what bfloat16 rounds differs between CPUs: within 0.05 on one, 0.14 on another
    ],
)
def test_twenty_updates_learn_what_they_learn_in_bfloat16(head, optimizer, margin, perform):
    options = OPTIMIZER | {"name": optimizer, "max_grad_norm": 1.0}
    changes = {"head": head, "updates": 20, "optimizer": options}
    changes |= {"algorithm": METHOD} if head == "value" else {}
    found, expected = (perform(sft(recipe, **changes))["numbers"] for recipe in ("rowwise", None))
    name = next(key for key in found[0] if "loss" in key)
    learned, expected_to = (rows[0][name] - rows[-1][name] for rows in (found, expected))
    assert learned > 0.1 * found[0][name] and learned != expected_to
    assert learned == pytest.approx(expected_to, rel=margin)


def test_a_checkpoint_serves_runs_with_float8_and_without(perform):
    moving = {"optimizer": OPTIMIZER}
    state = perform(sft("rowwise", updates=2, **moving))["state"]
    whole = perform(sft("rowwise", updates=3, **moving))
    again = perform(sft("rowwise", state=state, **moving))
    close(again["weights"], whole["weights"], 0.0)
    without = perform(sft(None, state=state, **moving))
    assert 0.99 < cosine(without, whole) < 0.9995 and without["names"] == whole["names"]


def test_the_average_of_the_weights_is_that_of_the_weights(perform):
    found = perform(sft("rowwise", actor={"ema": 0.6}, optimizer=OPTIMIZER, updates=2))
    average = found["state"]["average"]["weights"]
    assert average.keys() == found["weights"].keys()
    assert all(tensor.dtype == torch.float32 for tensor in average.values())


def float8_layers(model=WIDE, trains=True, **options):
    optimizer = make_optimizer(**OPTIMIZER) if trains else None
    world = start("cpu")
    strategy = make_strategy(world, dtype="bfloat16", fp8="rowwise")
    actor = make_actor(world, strategy, optimizer, model_config=model, **options)
    return {name for name, module in actor.network.named_modules() if isinstance(module, Float8Linear)}


def test_layers_of_the_blocks_that_train_compute_in_float8():
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    every = [*attention, *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]

    def named(parts, layers=(0, 1)):
        return {f"model.model.layers.{layer}.{part}" for layer in layers for part in parts}

    assert float8_layers() == named(every)
    assert float8_layers(frozen=["model.layers.0.*", "*.q_proj.*"]) == named([e for e in every if "q_p" not in e], [1])
    assert float8_layers(EXPERTS) == named(attention)
    assert float8_layers(WIDE | {"intermediate_size": 120}) == named(attention)
    assert float8_layers(trains=False) == set()


def test_compiled_blocks_compute_in_float8_and_are_compiled_once():
    torch._dynamo.reset()
    counters.clear()
    world, found = start("cpu"), []
    for compile in (False, True):
        optimizer = make_optimizer(**OPTIMIZER)
        strategy = make_strategy(world, dtype="bfloat16", fp8="rowwise_with_gw_hp", compile=compile)
        actor = make_actor(world, strategy, optimizer, model_config=WIDE)
        actor.begin_training(optimizer, 10)
        found.append([update(actor, make_batch()[torch.tensor(rows)]) for rows in ([1, 3, 5], [0, 2])])
    plain, compiled = found
    assert compiled[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.05)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        update(actor, make_batch()[torch.tensor([7, 6, 5, 4, 3])])
    assert counters["stats"]["unique_graphs"] == graphs > 0
    torch._dynamo.reset()


def test_a_plan_for_a_gpu_counts_the_casts(resolved):
    configs = (
        resolved("strategy=bf16", "strategy.device=cuda", f"strategy.fp8={r}", *SHAPE) for r in ("null", "rowwise")
    )
    plain, found = (memory_by_stage(config, 1)["update"] for config in configs)
    assert {key: found[key] for key in KEPT} == {key: plain[key] for key in KEPT}
    assert 1.02 < sum(found.values()) / sum(plain.values()) < 1.2
