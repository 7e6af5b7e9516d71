"""The largest tensors of each rank while a sharded model loads, trains, saves and syncs, against the arithmetic."""

import json
from typing import Any

import pytest

from rft.actor.init import blocks, load_model, read_config
from rft.data.encode.tokenizer import characters
from tests.modes.plan.runs_on_ranks import ALPHABET, FILE_BYTES, RUN, add_rows, tensor_bytes

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
CASES = {
    "plain": (),
    "optimizer and activations offloaded": (
        "strategy.activation_checkpointing=full",
        "strategy.optimizer_offload=true",
        "strategy.activation_offload=true",
    ),
    "parameters offloaded": ("strategy.param_offload=all", "algorithm/terms=[kl]"),
}
RANKS = {2: tuple(CASES), 4: ("plain",)}  # and their cases
STAGES = ("load", "rollout", "columns", "update", "publish", "export", "save")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of 34 MB, and the model."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), characters(alphabet=ALPHABET)
    made = load_model(None, read_config(None, SHAPE, len(tokenizer), "actor"), 0)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def runs(model, resolved, torchrun, tmp_path_factory):
    """What was counted on each rank and what is planned, of every case, by the number of ranks."""

    def run(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("ranks")
        configs = {name: config(resolved, model[0], folder, name) for name in RANKS[ranks]}
        (folder / "configs.json").write_text(json.dumps(configs))
        torchrun("tests/modes/plan/runs_on_ranks.py", folder / "configs.json", folder / "found.json", ranks=ranks)
        return json.loads((folder / "found.json").read_text())

    return {ranks: run(ranks) for ranks in RANKS}


def config(resolved, model, folder, case):
    """The config of a run whose rows are as long as rows can be."""
    where = (f"output_dir={folder / case}", f"actor.path={model}")
    found = resolved("mode=train", "actor=hf", *RUN, *where, *CASES[case])
    add_rows(found, folder)
    return found


def nbytes(tensors):
    return [tensor.nbytes for tensor in tensors]


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in RANKS.items() for case in cases])
def test_a_rank_holds_what_is_planned(runs, ranks, case):
    """Within 15 %; the plan is that of rank 0, which alone holds the files of an export."""
    planned = runs[ranks]["planned"][case]
    for counted in (rank[case] for rank in runs[ranks]["counted"]):
        assert counted.keys() == set(STAGES) <= planned.keys()
        for stage, terms in counted.items():
            assert tensor_bytes(planned[stage]) == pytest.approx(sum(terms.values()), rel=0.15), stage


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_shard_and_a_block(runs, model, ranks):
    """The engine hf holds the whole model while it is awake, on each rank: from `publish` to the next rollout."""
    parameters = list(model[1].parameters())
    whole, tensor = sum(nbytes(parameters)), max(nbytes(parameters))
    block, shard = sum(nbytes(blocks(model[1])[0].parameters())), whole / ranks
    assert whole > 30e6 and shard / 2 > FILE_BYTES
    between = 3 * shard + whole  # weights and AdamW's state, and the engine
    expected = {"load": shard + tensor, "publish": between, "export": between, "save": between + 3 * shard}
    for rank, found in enumerate(runs[ranks]["counted"]):
        for stage, size in expected.items():
            most = {"publish": tensor, "export": FILE_BYTES + block if rank == 0 else tensor}.get(stage, 0)
            assert 0.99 * size < sum(found["plain"][stage].values()) < 1.02 * size + most, (rank, stage)
        assert sum(found["plain"]["update"].values()) > 4 * shard + block
