"""Two ranks that split the matrices of the blocks do what one process does, with half of them each."""

import re

import pytest

from rft.distributed import start
from rft.strategy.parallel.tensor import TensorParallel
from tests.helpers import ALL_ON_ONE, MODEL, OPTIMIZER, SMALL, UNEVEN, close, job, make_actor, make_batch, make_strategy

pytestmark = pytest.mark.slow
SPLIT = {"tensor_parallel": 2}
BLOCKS, ROOT, NORMS = 2, 2 * 19 * 20 + 20, 2 * (2 * 20 + 2 * 4)  # of MODEL; what is left are matrices of the blocks


def model(kind, like=MODEL, **options):
    return like | {"model_type": kind} | options


def split(shares=UNEVEN, strategy=None, **changes):
    return job(shares, strategy=SPLIT | (strategy or {}), **{"updates": 3} | changes)


JOBS = {
    "qwen3": split(),
    "llama, with every bias": split(model=model("llama", attention_bias=True, mlp_bias=True)),
    "qwen2": split(model=model("qwen2", SMALL)),
    "sliding window": split(model=model("mistral", SMALL, sliding_window=4)),
    "tied": split(model=MODEL | {"tie_word_embeddings": True}),
    "all rows on one rank": split(ALL_ON_ONE),
    "shared prompts": split([[2, 3], [0, 1, 4, 5, 6, 7]], actor={"share_prefix": True}, batch=make_batch(prompt=2)),
    "critic": split(head="value"),
    "frozen": split(actor={"frozen": ["model.embed_tokens.*", "model.layers.0.*", "*.self_attn.k_norm.weight"]}),
    "average": split(actor={"ema": 0.6}),
    "recomputed": split(strategy={"activation_checkpointing": "full"}),
    "recomputed, selective": split(strategy={"activation_checkpointing": "selective"}),
    "whole and kept": split(strategy={"accumulate": "whole", "reshard_after_forward": False}),
}
ROUGH = {
    "bfloat16": split(strategy={"dtype": "bfloat16"}, updates=1),
    "float16": split(strategy={"dtype": "float16"}, updates=9),
    "adamw_8bit": split(optimizer=OPTIMIZER | {"name": "adamw_8bit"}),
}
GO_ON = ("qwen3", "tied", "critic", "average")


def on_one(given, **changes):
    return given | {"strategy": {k: v for k, v in given["strategy"].items() if k != "tensor_parallel"}} | changes


@pytest.fixture(scope="module")
def one_rank(perform):
    return {name: perform(on_one(given)) for name, given in (JOBS | ROUGH).items()}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks, one_rank):
    others = {f"{name}, onwards": JOBS[name] | {"updates": 1, "state": one_rank[name]["state"]} for name in GO_ON}
    others["not split"] = split(strategy={"reshard_after_forward": False, "tensor_parallel": 1})
    return on_two_ranks(JOBS | ROUGH | others)


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_do_what_one_does(name, one_rank, two_ranks):
    one, two = one_rank[name], two_ranks[name]
    close(two["gradient"], one["gradient"], 5e-5)
    close(two["weights"], one["weights"])
    for mine, theirs in zip(one["numbers"], two["numbers"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
    assert (two["column"] - one["column"]).abs().max() < 1e-5
    if "average" in one["state"]:
        close(two["state"]["average"]["weights"], one["state"]["average"]["weights"], 1e-6)


def test_less_than_float32_stays_close(one_rank, two_ranks):
    for name in ("bfloat16", "float16"):
        one, two = (ranks[name]["numbers"] for ranks in (one_rank, two_ranks))
        assert [theirs.get("loss_scale") for theirs in two] == [mine.get("loss_scale") for mine in one]
        norms = [numbers["grad_norm"] for numbers in one if "grad_norm" in numbers]
        assert [numbers["grad_norm"] for numbers in two if "grad_norm" in numbers] == pytest.approx(norms, rel=0.05)
    close(two_ranks["adamw_8bit"]["weights"], one_rank["adamw_8bit"]["weights"], 2e-4)  # blocks of other numbers


def test_a_rank_computes_with_half_of_the_matrices(two_ranks):
    """It never gathers the others; all else, and what only waits, is sharded as ever."""
    weights = two_ranks["qwen3"]["weights"]
    total = sum(tensor.numel() for tensor in weights.values())
    matrices = sum(tensor.numel() for name, tensor in weights.items() if ".layers." in name and tensor.dim() == 2)
    assert total == matrices + NORMS + ROOT
    assert two_ranks["not split"]["gathered"] == [4 * (matrices + NORMS)] * 2
    assert two_ranks["whole and kept"]["gathered"] == [4 * (matrices // 2 + NORMS)] * 2
    held = two_ranks["qwen3"]["held"]
    assert sum(held) == 4 * (matrices + 2 * NORMS + ROOT) and max(held) - min(held) <= 4 * 2 * 20


def test_collectives_of_an_update(two_ranks):
    """Nothing of the blocks is gathered or scattered; two parts of a block take tokens and give them back."""
    found, passes = two_ranks["qwen3"]["collectives"], 2 * 2  # micro-batches, forward and backward
    columns = 2  # log-probabilities and entropy, handed back to those who asked
    expected = {"all_gather": 2, "reduce_scatter": 2}  # of the root, a micro-batch
    expected |= {"all_to_all": passes * (BLOCKS * 2 * 2 + columns)}
    expected |= {"all_reduce": 3}  # the loss, the norm of the gradient, the gradient of what blocks hold whole
    assert found == {f"{name} float32": count for name, count in expected.items()}


@pytest.mark.parametrize("name", GO_ON)
def test_a_state_goes_on_on_one_process_and_on_two(name, perform, one_rank, two_ranks):
    expected = perform(on_one(JOBS[name], updates=1, state=one_rank[name]["state"]))
    close(two_ranks[f"{name}, onwards"]["weights"], expected["weights"])
    back = perform(on_one(JOBS[name], updates=1, state=two_ranks[name]["state"]))
    close(back["weights"], expected["weights"])
    assert two_ranks[name]["state"]["network"].keys() == one_rank[name]["state"]["network"].keys()


def test_every_rank_sees_every_weight_under_its_name(one_rank, two_ranks):
    assert two_ranks["tied"]["names"] == one_rank["tied"]["names"] * 2


def pretended(size, shards=1):
    """A strategy with a group that is not there."""
    strategy = make_strategy(start("cpu"))
    strategy.context = object.__new__(TensorParallel)
    strategy.context.size, strategy.context.shards = size, shards
    return strategy


@pytest.mark.parametrize(
    ("size", "shards", "kind", "options", "complaint"),
    [
        (3, 1, "qwen3", {}, "does not divide the 4 attention heads of actor; choose a divisor"),
        (4, 1, "qwen3", {}, "Qwen3Model of actor cannot be split (its 2 key heads do not divide over 4 ranks); set"),
        (2, 2, "qwen3", {"intermediate_size": 26}, "its 26 rows of layers.0.mlp.gate_proj do not divide over 4 ranks"),
        (
            2,
            1,
            "mixtral",
            {"num_local_experts": 3},
            "the 3 experts of layers.0.mlp.experts of actor do not divide over 2",
        ),
        (2, 3, "mixtral", {}, "the 16 rows of experts of layers.0.mlp.experts of actor do not divide over 3 ranks"),
        (2, 1, "granitemoe_swa", {}, "its plan in transformers asks for moe_tp_experts"),
        (2, 1, "phi3", {"pad_token_id": None}, "asks for colwise_gather_output, rowwise_split_input"),
        (2, 1, "gpt2", {}, "transformers has no plan for it"),
        (2, 1, "apertus", {}, "its layers.0.mlp is not made of linear layers that its plan knows"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(size, shards, kind, options, complaint):
    with pytest.raises(ValueError, match=rf"^strategy\.tensor_parallel={size}:? .*{re.escape(complaint)}"):
        make_actor(start("cpu"), pretended(size, shards), model_config=model(kind, SMALL, **options))


def test_padded_rows_are_refused():
    with pytest.raises(ValueError, match=r"^strategy\.tensor_parallel=2 needs packed rows: set actor\.packing=true"):
        make_actor(start("cpu"), pretended(2), model_config=MODEL, packing=False)


def test_processes_are_whole_groups():
    with pytest.raises(ValueError, match=r"^strategy\.tensor_parallel=2 does not divide the 1 processes; choose a"):
        make_strategy(start("cpu"), tensor_parallel=2)


@pytest.mark.parametrize("other", [{"context_parallel": 2}, {"compile": True}])
def test_strategies_that_do_not_go_with_it_are_refused(other):
    world, key = start("cpu"), next(iter(other))
    world.size = 2
    with pytest.raises(
        ValueError, match=rf"^strategy\.tensor_parallel=2 does not go with strategy\.{key}; leave strat"
    ):
        make_strategy(world, tensor_parallel=2, **other)
