"""What each rank holds while a sharded model gives its weights to an engine, counted, beside the arithmetic."""

from pathlib import Path

import pytest
import torch

from tests.rollout.weights_on_ranks import FILE_BYTES, LORA, SHAPE

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
        expected = {key: tensor.to(ENGINES[name]) for key, tensor in found["store"]["initial"].items()}
        assert found[name]["weights"].keys() == expected.keys()
        assert all(torch.equal(found[name]["weights"][key], tensor) for key, tensor in expected.items())
        assert found[name]["sampled"] == ranks[0][name]["sampled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store", "store, bfloat16", "store, adapters"])
def test_a_rank_copies_its_rows_alone(name, ranks):
    for found in ranks:
        _, largest = sizes(found)
        assert largest > FILE_BYTES, "or a file would be the larger one"
        shard = -(-largest // len(ranks))
        adapted = "adapters" in name  # base weight, product and sum, and A for the product
        allowed = (8 * shard + MATRIX) if adapted else 5 * shard  # two open files, two in work, and a copy
        for version in range(2):
            assert grown(found[name], f"write {version}")[0] < allowed + SLACK


@pytest.mark.slow
def test_ranks_without_the_folder_send_their_rows_to_rank_zero(ranks):
    first, *others = ranks
    _, largest = sizes(first)
    # two open files, two in work and a copy of its own rows, and the received ones of two files
    assert grown(first["store, apart"], "write 0")[0] < 5 * -(-largest // len(ranks)) + 2 * largest + SLACK
    assert first["store, apart"]["sent"] == [0, 0]
    for found in others:
        assert grown(found["store, apart"], "write 0")[0] < 6 * -(-largest // len(ranks)) + SLACK
    for name, itemsize in (("store, apart", 4), ("store, deltas", 2)):
        parts = [found[name]["sent"][0] for found in others]
        share = sizes(first, itemsize)[0] / len(ranks)
        assert all(abs(sent / share - 1) < 0.01 for sent in parts), "padding, and rows that do not divide"


@pytest.mark.slow
def test_ranks_without_the_folder_send_changed_elements_alone(ranks):
    for found in ranks[1:]:
        # three positions of 4 bytes and three values of 2, both aligned
        assert found["store, deltas"]["sent"][1] == 16 + 16 < found["store, apart"]["sent"][1]
        rows = found["store, deltas"]["sent"][0]
        assert abs(grown(found["store, deltas"], "write 1")[1] / rows - 1) < 0.01, "it keeps a copy of its rows"
    if len(ranks) == 4:  # two machines
        sent = [found["store, two machines"]["sent"] for found in ranks]
        assert sent[:2] == [[0, 0], [0, 0]] and all(0 < after < before / 20 for before, after in sent[2:])


@pytest.mark.slow
def test_the_store_has_the_weights_bit_by_bit(ranks):
    halves = ("store, bfloat16", "store, deltas")
    for name in [name for name in ranks[0] if name.startswith("store")]:
        for found in ranks:
            weights, full = found[name]["weights"], found[name]["full"]
            assert weights.keys() == full.keys()
            dtype = torch.bfloat16 if name in halves else torch.float32
            assert all(torch.equal(weights[key], tensor.to(dtype)) for key, tensor in full.items())
        assert len(ranks[0][name]["changed"]) == 1, "one parameter is another in the second version"
        most = max(len(parts) for parts in ranks[0][name]["parts"].values())
        assert most == (2 if name == "store, replicas" else len(ranks))
        assert all(found[name]["parts"] == ranks[0][name]["parts"] for found in ranks)


@pytest.mark.slow
def test_a_version_that_rank_zero_cannot_read_is_the_error_of_all(ranks):
    for error in (found["lost"] for found in ranks):
        assert "v0/model-1-" in error and "No such file" in error


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_the_error_of_all(ranks):
    for error, files in (found["failed"] for found in ranks):
        assert error.endswith("model-1-00001.safetensors: [Errno 28] No space left on device")
        assert files == ["draft"], "no version appears"
