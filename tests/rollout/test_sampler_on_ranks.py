"""What each rank holds while a sharded model gives its weights to an engine, counted, beside the arithmetic."""

from pathlib import Path

import pytest
import torch

from tests.rollout.weights_on_ranks import BUCKET, LORA, SHAPE

SLACK = 8192  # bytes: rows of padding, and the zeros of a sleeping engine
MATRIX = 4 * LORA["rank"] * SHAPE["intermediate_size"]  # bytes of the largest A
ENGINES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "rounded": torch.bfloat16}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, torchrun, tmp_path_factory):
    """What every rank found."""
    file = tmp_path_factory.mktemp("ranks") / "found.pt"
    torchrun(Path(__file__).parent / "weights_on_ranks.py", file, ranks=request.param)
    return torch.load(file, weights_only=False)


def sizes(found, itemsize=4):
    """Bytes of all weights of the model, and of the largest one."""
    counts = [tensor.numel() for tensor in found["store"]["full"].values()]
    return itemsize * sum(counts), itemsize * max(counts)


def grown(found, call):
    """The most bytes during a call, and those after it, beyond the shards."""
    start = found["bytes"]["start"][1]
    return tuple(count - start for count in found["bytes"][call])


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_holds_one_copy_in_its_dtype_and_none_asleep(name, ranks):
    for found in ranks:
        copy, largest = sizes(found, ENGINES[name].itemsize)
        whole, _ = sizes(found)
        assert found[name]["bytes"]["start"][1] < whole / len(ranks) + SLACK
        for call in ("publish 0", "publish 1"):
            peak, after = grown(found[name], call)
            assert abs(after - copy) < SLACK
            sent = -(-largest // len(ranks))  # the shard of the tensor before, which gloo may still hold
            assert peak < copy + largest + sent + SLACK
        assert grown(found[name], "release")[1] < SLACK


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_every_rank_samples_with_the_weights_of_the_trainer(name, ranks):
    for found in ranks:
        expected = {key: tensor.to(ENGINES[name]) for key, tensor in found["store"]["full"].items()}
        assert found[name]["weights"].keys() == expected.keys()
        assert all(torch.equal(found[name]["weights"][key], tensor) for key, tensor in expected.items())
        assert found[name]["sampled"] == ranks[0][name]["sampled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store", "store, bfloat16", "store, adapters"])
def test_rank_zero_alone_holds_a_bucket_and_the_others_a_shard_of_a_tensor(name, ranks):
    first, *others = ranks
    _, largest = sizes(first)
    assert largest > BUCKET, "or a bucket would be the larger one"
    adapted = "adapters" in name  # base weight, product and sum, and A for the product
    assert grown(first[name], "write")[0] < 4 * largest + SLACK  # bucket, tensor and its copy, and one that gloo holds
    for found in others:
        shard = -(-largest // len(ranks))
        allowed = 4 * shard + MATRIX if adapted else 2 * shard  # that of the tensor before may still be sent
        assert grown(found[name], "write")[0] < allowed + SLACK
        assert grown(found["store, on every rank"], "write")[0] > largest, "what was held before"


@pytest.mark.slow
def test_the_store_has_the_weights_bit_by_bit(ranks):
    names = [name for name in ranks[0] if name.startswith("store, ") or name == "store"]
    for name in names:
        dtype = torch.bfloat16 if name == "store, bfloat16" else torch.float32
        found = ranks[0][name]
        assert found["weights"].keys() == found["full"].keys()
        assert all(torch.equal(found["weights"][key], tensor.to(dtype)) for key, tensor in found["full"].items())
    assert not any(found[name]["weights"] for found in ranks[1:] for name in names)
    assert len(names) == {2: 4, 4: 6}[len(ranks)], "replicas and tensor parallelism need four ranks"
