"""The protocol of models: hooks run around their calls, and a model without weights needs two methods alone."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from rft.actor.base import ColumnModel, ModelContext, ModelHooks, ModelOptions, trainable
from rft.distributed import start
from tests.helpers import make_algorithm, make_batch, same, small_actor, update, weights


class Lengths(ColumnModel):
    """Writes the number of tokens of each row."""

    def compute_outputs(self, batch, outputs, temperature, dummy):
        tokens = batch["tokens", "attention_mask"].sum(1, keepdim=True)
        return {output: tokens * batch["loss_mask"] for output in outputs}


class Recorder(ModelHooks):
    """Records every call; doubles what is computed, and cuts updates to their first micro-batches."""

    def __init__(self, limit=99):
        self.calls = []
        self.limit = limit

    def is_blank(self, model):
        return model.key == "absent"

    def on_columns(self, model, columns):
        self.calls.append((model.key, *columns))
        for column in columns.values():
            column.mul_(2)

    @contextmanager
    def on_update(self, model):
        self.calls.append((model.key, "begins"))
        yield
        self.calls.append((model.key, "ends"))

    def on_micro_batches(self, model, micro_batches):
        for number, micro in enumerate(micro_batches, start=1):
            yield replace(micro, last=True) if number == self.limit else micro
            if number == self.limit:
                return


@pytest.fixture
def context():
    return ModelContext("lengths", start("cpu"), None, None, 0)


def test_a_model_without_weights(context):
    model, batch = Lengths(context, ModelOptions()), make_batch()
    column = model.compute(batch, ("length",), 1.0)["length"]
    assert (column[0][batch["loss_mask"][0]] == batch["tokens", "attention_mask"][0].sum()).all()
    assert model.blank(batch, ("length",))["length"].equal(torch.zeros_like(column, dtype=torch.float32))
    assert model.state_dict() == {} and list(model.own_tensors()) == [] and model.optimizer_options is None
    with pytest.raises(NotImplementedError, match="Lengths has no weights to sample with"):
        model.weights()
    with pytest.raises(AssertionError, match="lengths: Lengths cannot train"):
        trainable(model)


def test_a_model_has_to_compute(context):
    with pytest.raises(TypeError, match="abstract"):
        ColumnModel(context, ModelOptions())


def test_the_context_of_another_model_has_its_key_and_shares_the_rest(context):
    other = context.of("critic")
    assert other.key == "critic" and other.hooks is context.hooks and other.world is context.world


def test_a_hook_sees_what_is_computed_and_replaces_it_with_zeros(context):
    hooks, batch = Recorder(), make_batch()
    plain = Lengths(context, ModelOptions()).compute(batch, ("length",), 1.0)["length"]
    doubled = Lengths(replace(context, hooks=hooks), ModelOptions()).compute(batch, ("length",), 1.0)["length"]
    assert doubled.equal(2 * plain)
    absent = Lengths(replace(context, key="absent", hooks=hooks), ModelOptions())
    column = absent.compute(batch, ("length",), 1.0)["length"]
    assert plain.any() and column.equal(torch.zeros(plain.shape))
    assert hooks.calls == [("lengths", "length")]


def test_hooks_of_an_actor_see_updates_and_choose_micro_batches(context):
    hooks, batch = Recorder(limit=1), make_batch()
    cut, whole = small_actor(context.world, cap=12), small_actor(context.world, cap=12)
    cut.context = replace(cut.context, hooks=hooks)
    before = weights(cut)
    update(cut, batch, make_algorithm())
    update(whole, batch, make_algorithm())
    assert hooks.calls == [("actor", "begins"), ("actor", "ends")]
    found, expected = weights(cut), weights(whole)
    assert any(not torch.equal(found[name], before[name]) for name in found)
    assert any(not torch.allclose(found[name], expected[name], atol=1e-6) for name in found), "of other micro-batches"
    hooks.limit = 99
    again = small_actor(context.world, cap=12)
    again.context = replace(again.context, hooks=hooks)
    update(again, batch, make_algorithm())
    same(weights(again), expected, 0.0)
