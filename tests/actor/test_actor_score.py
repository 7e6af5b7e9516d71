"""An actor with a score head: one result however its rows lie, and an export that gives the same scores. The mean and
the deviation in the config of such an export."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rft.actor.loading.export import add_to_config
from rft.actor.model import with_end_token
from rft.actor.score_moments import ScoreMoments, forget_moments, read_moments, score_moments
from rft.algorithm.check import build_algorithm
from rft.batch.columns import lengths
from rft.data.encode.encoder import Encoder
from tests.helpers import (
    LAYOUTS,
    MODEL,
    make_actor,
    make_algorithm,
    make_batch,
    make_strategy,
    same,
    small_actor,
    update,
    weights,
    wider,
)

BRADLEY_TERRY = {"name": "bradley_terry", "margin": False}
CENTERING = {"centering": {"name": "score_centering", "coef": 0.1}}


def algorithm():
    options = replace(make_algorithm().options, loss=BRADLEY_TERRY, terms=CENTERING, aggregation=None, critic_loss=None)
    return build_algorithm(options, "algorithm")


def pairs(seed=0):
    """Eight rows: four pairs, whose rows begin alike."""
    batch = make_batch(seed)
    batch["unit"] = batch["group"].clone()
    batch["chosen"] = torch.arange(len(batch)) % 2 == 0
    batch["tokens", "input_ids"][1::2, :2] = batch["tokens", "input_ids"][::2, :2]
    return batch


def scores(actor, batch):
    return actor.compute(batch, ("score",), 1.0)["score"].sum(1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_do_not_depend_on_how_rows_lie(world, name):
    actor, batch = small_actor(world, head="score", rows=LAYOUTS["padded"]), pairs()
    expected = scores(actor, batch)
    assert expected.std() > 0.01
    other = small_actor(world, head="score", rows=LAYOUTS[name], cap=26)
    same(scores(other, batch), expected)
    same(scores(other, wider(batch)), expected)
    order = torch.tensor([6, 1, 7, 0, 3, 2, 5, 4])
    same(scores(other, batch[order]), expected[order])


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_does_not_depend_on_micro_batches_order_or_padding(world, name):
    whole = small_actor(world, head="score", rows=LAYOUTS["padded"])
    expected, batch = update(whole, pairs(), algorithm()), pairs()
    assert expected["loss/bradley_terry"] > 0 and expected["loss/centering"] > 0 and expected["grad_norm"] > 0
    for rows in (batch, batch[torch.tensor([6, 1, 7, 0, 3, 2, 5, 4])], wider(batch)):
        actor = small_actor(world, head="score", rows=LAYOUTS[name], cap=26)
        found = update(actor, rows, algorithm())
        told = [key for key in expected if not key.startswith(("padding", "prefix"))]
        same({key: found[key] for key in told}, {key: expected[key] for key in told}, 1e-5)
        same(weights(actor), weights(whole), 1e-5)


def test_training_prefers_the_chosen(world):
    actor, batch = small_actor(world, head="score"), pairs()
    for _ in range(8):
        found = update(actor, batch, algorithm())
    assert found["preference/accuracy"] == 1.0
    gaps = scores(actor, batch).view(4, 2)
    assert (gaps[:, 0] > gaps[:, 1]).all()


def exported(actor, folder):
    actor.save_model(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_of_the_export_appends_the_end_token(world, tmp_path):
    """The score is read from it. Encoding for this project stays the same, and a second export adds no second one."""
    actor = small_actor(world, head="score")
    model, tokenizer = exported(actor, tmp_path)
    plain, end = actor.tokenizer("12").input_ids, actor.tokenizer.eos_token_id
    assert tokenizer("12").input_ids == [*plain, end]
    with torch.no_grad():
        given = model(torch.tensor([[*plain, end]])).logits
        same(model(**tokenizer(["12", "1"], return_tensors="pt", padding=True)).logits[:1], given)
    other = tokenizer.convert_tokens_to_ids("7")
    assert with_end_token(actor.tokenizer, other)("12").input_ids == [*plain, other], "the end of a chat template"
    again = with_end_token(tokenizer, end)
    assert again("12").input_ids == [*plain, end]
    row = {"prompt": "1", "response": "2"}
    assert Encoder(tokenizer, "none", None).example(row) == Encoder(actor.tokenizer, "none", None).example(row)
    tokenizer.bos_token = tokenizer.eos_token  # as GPT-2: it is no BOS that the tokenizer adds
    assert Encoder(tokenizer, "none", None).prompt(row) == plain[:1]


def test_the_export_is_a_classifier_with_the_same_scores(world, tmp_path):
    actor, batch = small_actor(world, head="score"), pairs()
    update(actor, batch, algorithm())
    model, tokenizer = exported(actor, tmp_path)
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    rows = [
        {"input_ids": ids[:length]} for ids, length in zip(batch["tokens", "input_ids"], lengths(batch), strict=True)
    ]
    expected = scores(actor, batch)
    for side in ("right", "left"):
        tokenizer.padding_side = side
        padded = tokenizer.pad(rows, return_tensors="pt")
        positions = (padded.attention_mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            same(model(**padded, position_ids=positions).logits[:, 0], expected, 1e-5)


def test_an_actor_goes_on_from_an_export_with_its_head(world, tmp_path):
    actor, batch = small_actor(world, head="score"), pairs()
    update(actor, batch, algorithm())
    actor.save_model(tmp_path)
    options = {"head": "score", "path": str(tmp_path), "model_config": None, "seed": 7}
    same(scores(make_actor(world, make_strategy(world), **options), batch), scores(actor, batch))


def saved_config(folder, **numbers):
    AutoConfig.for_model(**MODEL, **numbers).save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


def test_moments_by_hand():
    found = score_moments(torch.tensor([1.0, 2.0, 6.0]))
    assert found == ScoreMoments(mean=3.0, std=pytest.approx(7.0**0.5))  # (4 + 1 + 9) / 2
    assert [ScoreMoments(3.0, 2.0).normalize(score) for score in (1.0, 3.0, 8.0)] == [-1.0, 0.0, 2.5]


def test_a_model_keeps_them_until_it_trains(tmp_path):
    assert read_moments(saved_config(tmp_path), "m") is None
    before = json.loads((tmp_path / "config.json").read_text())
    add_to_config(asdict(ScoreMoments(0.1, 0.7)), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert read_moments(config, "m") == ScoreMoments(0.1, 0.7)
    assert json.loads((tmp_path / "config.json").read_text()) == before | {"mean": 0.1, "std": 0.7}
    forget_moments(config)
    assert read_moments(config, "m") is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"mean": 0.0, "std": 0.0}, r"^m\.std=0.0: it must be above 0"),
        ({"mean": float("nan"), "std": 1.0}, r"^m\.mean=nan: it must be finite"),
        ({"mean": [0.5, 0.5], "std": 1.0}, r"^m\.mean: expected number"),
        ({"mean": 0.5}, r"^m\.std is missing"),
    ],
)
def test_what_are_no_moments_is_refused(tmp_path, numbers, message):
    with pytest.raises(ValueError, match=message):
        read_moments(saved_config(tmp_path, **numbers), "m")
