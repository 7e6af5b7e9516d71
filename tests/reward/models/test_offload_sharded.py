"""Sharded reward models: the scores of whole models, however rows and ranks fall, and counted bytes of each rank."""

import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from rft.distributed import SINGLE_PROCESS, start
from rft.strategy.fsdp2 import FSDP2
from tests.families import family
from tests.helpers import strategy_options
from tests.reward.models import test_base_media, test_judge, test_scalar
from tests.reward.models.sharded_on_ranks import CAPS, RESPONSES, ROWS, SHARES, nodes, sharded
from tests.reward.models.test_scalar import save
from tests.reward.reward_of import reward_of

LARGE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 24}
BLOCK = 4 * (3 * 128 * 512 + 2 * 128 * 16 + 2 * 128 * 8 + 2 * 128 + 2 * 4)  # bytes of a layer of it
REST = 400_000  # bytes of a tensor of a file that is read, of activations and of the weights outside of the layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save(folder / "scalar", tie_word_embeddings=False)
    save(folder / "steps", AutoModelForTokenClassification, num_labels=2)
    save(folder / "judge", AutoModelForCausalLM, tie_word_embeddings=True)
    save(folder / "large", AutoModelForSequenceClassification, **LARGE)
    return folder


def whole(folder, **changes):
    """The terms of all rows by whole models in memory that torch has allocated.

    Weights that safetensors has mapped lie at other addresses, where some kernels round differently.
    """
    reward = sharded(start("cpu"), nodes(folder, **changes), shard=False)
    for term in reward.terms.values():
        with term._model.loaded() as model:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
    return reward.score(RESPONSES, ROWS).terms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cap", CAPS)
def test_one_rank_has_the_scores_of_whole_models_to_the_bit(folder, cap, dtype):
    changes = {"micro_batch_tokens": cap, "dtype": dtype}
    found = sharded(start("cpu"), nodes(folder, **changes)).score(RESPONSES, ROWS).terms
    for name, expected in whole(folder, **changes).items():
        assert expected.std() > 0.01 and torch.equal(found[name], expected), name


def test_the_watchdog_can_name_the_loading_and_the_forwards(folder):
    world, seen = start("cpu"), []
    reward = sharded(world, nodes(folder))
    for name, term in reward.terms.items():
        load, forward = term._model._load, term._forward

        def watched(*given, of, name=name):
            seen.append((name, world.wait.work))
            return of(*given)

        term._model._load, term._forward = partial(watched, of=load), partial(watched, of=forward)
    reward.score(RESPONSES, ROWS)
    works = ("the loading of", "a forward pass of")
    assert {*seen} == {(name, f"{work} reward.terms.{name}") for name in reward.terms for work in works}
    assert world.wait.work == ""


def test_shards_in_host_memory_have_the_same_scores(folder):
    reward = reward_of(nodes(folder), "scalar", shard=True, offload="cpu")
    world, options = start("cpu"), strategy_options(device="cpu")
    reward.shard_models(world, lambda *how: FSDP2(options.scoring_options(*how), world))
    found = reward.score(RESPONSES, ROWS).terms
    for name, expected in whole(folder).items():
        assert torch.equal(found[name], expected), name
        assert reward.terms[name].offloaded


@pytest.fixture(scope="module")
def two_ranks(torchrun, folder):
    test_base_media.save(folder / "media", "qwen2_5_vl", "score")
    torchrun("tests/reward/models/sharded_on_ranks.py", folder)
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("cap", CAPS)
def test_two_ranks_have_these_scores_however_the_rows_fall(folder, two_ranks, cap, name):
    for term, expected in whole(folder, micro_batch_tokens=cap).items():
        expected = torch.zeros(len(ROWS)) if name == "nothing" else expected
        torch.testing.assert_close(two_ranks["scores"][cap, name][term], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_ranks_gather_the_tower_together_where_one_of_them_has_rows_with_media(folder, two_ranks):
    reward = reward_of({"media": test_scalar.node(folder / "media", template="chat")}, "media")
    expected = reward.score(test_base_media.RESPONSES, test_base_media.rows(family("qwen2_5_vl"))).terms["media"]
    torch.testing.assert_close(torch.tensor(two_ranks["media"]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_rank_holds_its_shard_and_one_block(two_ranks):
    """While it loads and scores. FSDP2 gathers a block through two buffers of its size, and a thread of gloo may still
    hold those of the block before."""
    (whole, _), sharded = two_ranks["peaks"][False], two_ranks["peaks"][True]
    assert whole["first"] >= whole["kept"] > 24 * BLOCK
    assert sum(rank["kept"] for rank in sharded) == whole["kept"]
    for rank in sharded:
        assert rank["kept"] <= 0.501 * whole["kept"]
        assert max(rank["first"], rank["second"]) <= rank["kept"] + 4 * BLOCK + REST < 0.7 * whole["kept"]


@pytest.mark.slow
def test_a_row_that_cannot_be_encoded_is_dropped_on_its_rank_alone(folder, two_ranks):
    scored, failed = two_ranks["without prompt"]
    assert scored["unscored"] == [{}, {}] and failed["unscored"] == [{"steps": "ValueError"}]
    assert math.isnan(failed["first"]["steps"][0]) and not math.isnan(failed["first"]["judge"][0])
    for term, expected in whole(folder).items():
        torch.testing.assert_close(torch.tensor(scored["first"][term]), expected[:2], rtol=1e-6, atol=1e-6)
        for rank in (scored, failed):
            torch.testing.assert_close(rank["second"][term], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_forward_that_fails_on_one_rank_ends_all(folder, two_ranks):
    waited, failed = ((folder / f"failure{rank}").read_text() for rank in range(2))
    assert failed == "CollectiveError: IndexError: index out of range in self"
    assert waited.startswith(f"PeerError: rank 1 failed first: {failed}; rank 0 waited in ")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"offload": "disk"}, r"^reward\.offload=disk: the shards of a model are not read again each time; set"),
        ({"call": {"tries": 2}}, {}, r"^reward\.terms\.term\.call\.tries=2: with reward\.shard=true all ranks compute"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused_before_a_model_is_loaded(tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=message):
        reward_of({"term": test_scalar.node(tmp_path, **changes)}, "term", shard=True, **options)


def test_a_judge_that_writes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^reward\.shard=true: reward\.terms\.term \(WritingJudge\) needs its whole"):
        reward_of({"term": test_judge.writing(tmp_path)}, "term", shard=True)


def test_terms_without_a_model_of_this_process_stay_as_they_are():
    reward = reward_of({"exact": {"name": "exact_match", "weight": 1.0, "strip": True}}, "exact", shard=True)
    reward.shard_models(SINGLE_PROCESS, lambda dtype, offload: pytest.fail("no strategy is needed"))
    assert not reward.terms["exact"].collective
    assert reward.score(["12", "1"], [{"answer": "12"}] * 2).total.tolist() == [1.0, 0.0]
