"""What lies in host memory changes no number: every kind of offloading with every kind of spreading, bit for bit."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from rft.distributed import start
from rft.strategy.base import ModelFacts
from tests.helpers import (
    MODEL,
    OPTIMIZER,
    UNEVEN,
    job,
    make_actor,
    make_batch,
    make_optimizer,
    make_strategy,
    strategy_options,
    update,
)

OFFLOADS = {
    "parameters": {"param_offload": "all"},
    "optimizer": {"optimizer_offload": True},
    "activations": {"activation_offload": True},
}
SPREAD = {
    "plain": {},
    "bfloat16, kept and whole": {
        "strategy": {"dtype": "bfloat16", "reshard_after_forward": False, "accumulate": "whole"}
    },
    "tied, 8 bit, average": {
        "model": MODEL | {"tie_word_embeddings": True},
        "optimizer": OPTIMIZER | {"name": "adamw_8bit"},
        "actor": {"ema": 0.6},
    },
    "critic, float16": {"head": "value", "strategy": {"dtype": "float16"}, "updates": 9},
    "frozen, recomputed": {
        "actor": {"frozen": ["model.embed_tokens.*"]},
        "strategy": {"activation_checkpointing": "full"},
    },
    "replicas": {"strategy": {"replicas": 2}},
    "slices": {"strategy": {"context_parallel": 2}},
    "split matrices": {"strategy": {"tensor_parallel": 2}},
}
CASES = [(spread, offload) for spread in SPREAD for offload in OFFLOADS]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def spread_job(name, offload=None):
    changes = {"updates": 3} | SPREAD[name]
    return job(UNEVEN, **changes | {"strategy": changes.get("strategy", {}) | OFFLOADS.get(offload, {})})


def make(device="cpu", trains=True, **options):
    torch.set_num_threads(1)
    world, optimizer = start(device), make_optimizer(**OPTIMIZER)
    actor = make_actor(world, make_strategy(world, **options), optimizer if trains else None, model_config=MODEL)
    if trains:
        actor.begin_training(optimizer, 10)
    return actor


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks):
    jobs = {(name, None): spread_job(name) for name in SPREAD}
    return on_two_ranks(jobs | {case: spread_job(*case) for case in CASES})


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_ranks_do_what_they_do_without(case, two_ranks):
    expected, found = two_ranks[case[0], None], two_ranks[case]
    for key in ("gradient", "weights"):
        assert found[key].keys() == expected[key].keys()
        for name, tensor in expected[key].items():
            assert torch.equal(found[key][name], tensor), name
    assert found["numbers"] == expected["numbers"]
    assert torch.equal(found["column"], expected["column"])
    flat, plain = (torch.utils._pytree.tree_flatten(result["state"])[0] for result in (found, expected))
    for one, other in zip(flat, plain, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", OFFLOADS)
def test_one_process_does_what_it_does_without(kind):
    one, other = make(), make(**OFFLOADS[kind])
    for _ in range(2):
        assert update(other, make_batch()) == update(one, make_batch())
    for (name, expected), (_, found) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(found, expected), name
    assert other.nonfinite_tensor() is None
    one.load_state_dict(other.state_dict())
    assert update(one, make_batch()) == update(other, make_batch())


@pytest.mark.parametrize(("option", "offloaded"), [("none", []), ("frozen", [False]), ("all", [True, False])])
def test_which_models_are_offloaded(option, offloaded):
    strategy = make_strategy(start("cpu"), param_offload=option)
    assert [trains for trains in (True, False) if strategy.offloads(trains)] == offloaded


@pytest.mark.parametrize("option", ["frozen", "all"])
def test_a_frozen_model_computes_the_same_columns(option):
    columns = [
        make(trains=False, param_offload=name).compute(make_batch(), ("logprobs",), 0.8) for name in ("none", option)
    ]
    assert torch.equal(columns[0]["logprobs"], columns[1]["logprobs"])


@on_a_gpu
@pytest.mark.parametrize("kind", OFFLOADS)
def test_on_a_gpu_the_numbers_are_close(kind):
    """The optimizer steps on the CPU with `param_offload=all`, so not to the bit."""
    one, other = make("cuda"), make("cuda", **OFFLOADS[kind])
    for _ in range(2):
        assert update(other, make_batch()) == pytest.approx(update(one, make_batch()), rel=1e-4)
    for (_, expected), (_, found) in zip(one.weights(), other.weights(), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@on_a_gpu
def test_on_a_gpu_parameters_gradients_and_state_are_in_pinned_memory():
    actor, seen = make("cuda", param_offload="all"), []
    optimizer = actor.train_state.optimizer
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in actor.network.parameters()))
    update(actor, make_batch())
    state = [tensor for parts in optimizer.state.values() for tensor in parts.values()]
    assert seen and all(tensor.device.type == "cpu" for tensor in (*seen, *state))
    for parameter in (*actor.network.parameters(), *make("cuda", False, param_offload="frozen").network.parameters()):
        assert isinstance(parameter, DTensor) and parameter.to_local().is_pinned()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (ModelFacts("lm", optimizers={"actor": "muon"}), r"^actor\.optimizer\.name=muon: with strategy\.param_offload"),
        (ModelFacts("lm", lora=True, quantized=True), r"^actor\.lora\.quantize: packed weights cannot be merged in ho"),
    ],
)
def test_what_cannot_step_or_merge_on_the_cpu_is_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        strategy_options(param_offload="all").check({"actor": facts})
    strategy_options(optimizer_offload=True).check({"actor": facts})


def test_frozen_models_can_be_offloaded_if_there_are_any():
    options, actor = strategy_options(param_offload="frozen"), ModelFacts("lm", optimizers={"actor": "adamw"})
    options.check({"actor": actor, "reference": ModelFacts("lm")})
    with pytest.raises(
        ValueError, match=r"^strategy\.param_offload=frozen: all models of the run train; set it to all, or"
    ):
        options.check({"actor": actor})
