"""The hooks of the plan: columns become real, models that compute elsewhere are not called, few micro-batches come."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from rft.actor.base import ColumnModel
from rft.actor.packing.micro_batches import MicroBatch
from rft.modes.plan.hooks import PlanHooks
from rft.modes.plan.skip_compute import SkipCompute

BATCH = TensorDict({"loss_mask": torch.ones(2, 3, dtype=torch.bool)}, batch_size=[2])


class Model(ColumnModel):
    def __init__(self, hooks=None):
        self.context = SimpleNamespace(hooks=hooks)

    def compute_outputs(self, batch, outputs, temperature, dummy):
        return {output: torch.ones(2, 3) for output in outputs}


class RemoteModel(Model):
    remote = True

    def compute_outputs(self, batch, outputs, temperature, dummy):
        raise AssertionError("a remote model was called")


@pytest.fixture
def skip():
    return SkipCompute()


def micro_batches(count):
    for number in range(1, count + 1):
        yield MicroBatch(torch.tensor([number]), BATCH, None, 10 * number, number == count, {}, torch.tensor([0]), None)


def test_columns_that_a_model_computes_have_numbers(skip):
    column = torch.arange(6.0)

    with skip, skip.creating():
        placeholder = torch.empty(2)
    with skip:
        column[2:4] = placeholder
    PlanHooks(skip).on_columns(Model(), {"logprobs": column})
    with skip:
        assert column.sum().item() == 15.0, "a placeholder would answer 1"


def test_remote_models_and_those_that_are_done_return_zeros(skip):
    hooks = PlanHooks(skip)
    model, other = Model(hooks), Model(hooks)
    assert RemoteModel(hooks).compute(BATCH, ("logprobs",), 1.0)["logprobs"].tolist() == [[0.0] * 3] * 2
    assert model.compute(BATCH, ("logprobs",), 1.0)["logprobs"].all()
    hooks.blank.append(model)
    assert not model.compute(BATCH, ("logprobs",), 1.0)["logprobs"].any()
    assert other.compute(BATCH, ("logprobs",), 1.0)["logprobs"].all()


@pytest.mark.parametrize(("limit", "expected"), [(None, 3), (1, 1), (2, 2), (3, 3), (5, 3)])
def test_only_the_first_micro_batches_come_and_the_last_one_is_marked(limit, expected, skip):
    hooks = PlanHooks(skip)
    hooks.limit = limit
    found = list(hooks.on_micro_batches(Model(), micro_batches(3)))
    assert [micro.computed for micro in found] == [10, 20, 30][:expected]
    assert [micro.last for micro in found] == [False] * (expected - 1) + [True]
