"""A reference without a model of its own."""

import pytest
import torch

from tests.actor.lora.adapters import held, logprobs, make, same, update, weights
from tests.helpers import make_batch
from tests.train.checkpoint.states import restore, whole_state


def test_the_reference_is_the_policy_as_it_was_and_no_second_model(world):
    policy, separate, batch = make(world, {}), make(world, key="reference", trains=False, seed=8), make_batch()
    alone = held(policy)
    reference = policy.frozen_copy("reference")
    same(logprobs(reference, batch), logprobs(policy, batch), 0.0)
    update(policy, batch, 2)  # as a warm-up would
    reference.copy_weights_from(policy)
    separate.copy_weights_from(policy)
    update(policy, batch, 2)
    before = weights(policy)
    same(logprobs(reference, batch), logprobs(separate, batch))
    same(weights(reference), weights(separate), 0.0)
    assert not torch.allclose(logprobs(policy, batch), logprobs(separate, batch), atol=1e-3)
    same(weights(policy), before, 0.0)
    adapters = sum(p.to_local().nbytes for p in policy.network.parameters() if p.requires_grad)
    assert held(policy) == alone and sum(kept.to_local().nbytes for kept in reference._kept) == adapters
    assert adapters < 0.6 * held(separate)  # of a model of two layers, each with 260 x rank numbers


def test_a_reference_that_fails_leaves_the_policy_as_it_is(world):
    policy, batch = make(world, {}), make_batch()
    reference = policy.frozen_copy("reference")
    update(policy, batch)
    before = weights(policy)
    with pytest.raises(KeyError):
        logprobs(reference, batch.exclude("loss_mask"))
    same(weights(policy), before, 0.0)


def test_the_reference_is_saved_with_its_adapters_alone(world):
    (policy, other), batch = (make(world, {}) for _ in range(2)), make_batch()
    reference, loaded = policy.frozen_copy("reference"), other.frozen_copy("reference")
    update(policy, batch)
    reference.copy_weights_from(policy)
    update(policy, batch)
    state = whole_state(reference)
    assert {f"model.{name}" for name in state["network"]} == set(policy.state_dict()["network"])
    before = weights(other)
    restore(loaded, state)
    same(weights(loaded), weights(reference), 0.0)
    same(weights(other), before, 0.0)
    assert not torch.equal(
        weights(reference)["model.layers.0.mlp.up_proj.weight"], weights(policy)["model.layers.0.mlp.up_proj.weight"]
    )
