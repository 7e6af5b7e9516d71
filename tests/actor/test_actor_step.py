"""An actor with a head for steps: one result however its rows lie, and an export that gives the same scores."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from rft.algorithm.check import build_algorithm
from rft.batch.columns import lengths
from tests.helpers import (
    LAYOUTS,
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


def algorithm():
    options = make_algorithm(aggregation="token_mean").options
    return build_algorithm(replace(options, loss={"name": "step_cross_entropy"}, critic_loss=None), "algorithm")


def stepped():
    """Eight rows with steps here and there; those of a group begin alike."""
    batch = make_batch()
    batch["step_labels"] = torch.where(batch["loss_mask"], batch["advantages"].sigmoid(), 0.0)
    batch["tokens", "input_ids"][1::2, :2] = batch["tokens", "input_ids"][::2, :2]
    return batch


def scores(actor, batch):
    return actor.compute(batch, ("score",), 1.0)["score"]


@pytest.mark.parametrize("name", ["shared", "padded"])
def test_scores_and_an_update_do_not_depend_on_micro_batches_order_or_padding(world, name):
    order = torch.tensor([6, 1, 7, 0, 3, 2, 5, 4])
    whole, batch = small_actor(world, head="step", rows=LAYOUTS["padded"]), stepped()
    before, expected = scores(whole, batch), update(whole, batch, algorithm())
    assert expected["loss/step_cross_entropy"] > 0 and expected["grad_norm"] > 0 and before.std() > 0.01
    told = [key for key in expected if not key.startswith(("padding", "prefix"))]
    actor, rows = small_actor(world, head="step", rows=LAYOUTS[name], cap=26), wider(batch[order])
    same(scores(actor, rows)[:, : before.shape[1]], before[order])
    found = update(actor, rows, algorithm())
    same({key: found[key] for key in told}, {key: expected[key] for key in told}, 1e-5)
    same(weights(actor), weights(whole), 1e-5)


def test_the_export_is_a_classifier_of_tokens_with_the_same_scores(world, tmp_path):
    actor, batch = small_actor(world, head="step"), stepped()
    update(actor, batch, algorithm())
    actor.save_model(tmp_path)
    model, tokenizer = (
        AutoModelForTokenClassification.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    assert type(model).__name__ == "Qwen3ForTokenClassification" and model.config.num_labels == 2
    expected = scores(actor, batch)
    rows = [
        {"input_ids": row[:length]} for row, length in zip(batch["tokens", "input_ids"], lengths(batch), strict=True)
    ]
    with torch.no_grad():
        bad, good = model(**tokenizer.pad(rows, return_tensors="pt")).logits.unbind(2)
    same(torch.where(batch["loss_mask"], good - bad, 0.0), expected, 1e-5)
    same(
        scores(
            make_actor(world, make_strategy(world), head="step", path=str(tmp_path), model_config=None, seed=7), batch
        ),
        expected,
    )
