"""Weights of an actor: taken over, saved, lent to an engine, and restored."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft.actor.base import TRAINING_STATE
from rft.actor.model import add_end_tokens, end_tokens, set_end_tokens
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import Sampling
from tests.helpers import (
    OPTIMIZER,
    hf_engine,
    make_actor,
    make_algorithm,
    make_batch,
    make_optimizer,
    same,
    small_actor,
    update,
    weights,
)
from tests.train.checkpoint.states import restore, whole_state


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_start_like_takes_over_the_weights(world, head, tied, reshard):
    """Also where blocks stay gathered after a forward that no backward followed."""
    batch = make_batch()
    policy = small_actor(world, seed=1, reshard=reshard, tie_word_embeddings=tied)
    key, output = {"lm": ("actor", "logprobs"), "value": ("critic", "values")}[head]
    other = small_actor(world, key, head, seed=2, reshard=reshard, tie_word_embeddings=tied)
    for actor, name in ((policy, "logprobs"), (other, output)):
        actor.compute(batch, (name,), 1.0)[name]
    other.copy_weights_from(policy)
    theirs = {name.removeprefix("model."): tensor for name, tensor in policy.weights()}
    for name, tensor in other.weights():
        assert torch.equal(tensor, theirs[name.removeprefix("model.")])
    if head == "lm":
        assert torch.equal(
            other.compute(batch, ("logprobs",), 1.0)["logprobs"], policy.compute(batch, ("logprobs",), 1.0)["logprobs"]
        )
    before = weights(policy)
    other.begin_training(make_optimizer(**OPTIMIZER), 10)
    update(other, batch, make_algorithm())
    same(weights(policy), before, 0.0)


def test_start_like_refuses_another_shape(world):
    policy, critic = small_actor(world), small_actor(world, "critic", "value", hidden_size=32)
    with pytest.raises(ValueError, match=r"^critic\.path: the weights .* differ in shape from those of actor\.path"):
        critic.copy_weights_from(policy)


def test_training_goes_on_after_a_forward_without_a_backward_that_keeps_its_blocks(world):
    """An optimizer that is made in between holds the sharded weights all the same."""
    batch, algorithm = make_batch(), make_algorithm()
    one, other = small_actor(world), small_actor(world, reshard=False)
    for actor in (one, other):
        actor.compute(batch, ("logprobs",), 1.0)["logprobs"]
        actor.begin_training(make_optimizer(**OPTIMIZER), 10)
        for _ in range(2):
            update(actor, batch, algorithm)
            actor.compute(batch, ("logprobs",), 1.0)["logprobs"]
    same(weights(other), weights(one))
    assert not torch.equal(weights(other)["model.lm_head.weight"], weights(small_actor(world))["model.lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_loaded_by_transformers(world, tmp_path, tied):
    actor, batch = small_actor(world, tie_word_embeddings=tied), make_batch()
    update(actor, batch, make_algorithm())
    actor.save_model(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("3a").input_ids == actor.tokenizer("3a").input_ids
    assert model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    logp = (model(input_ids=batch["tokens", "input_ids"]).logits / 0.8).log_softmax(-1)
    expected = logp[:, :-1].gather(-1, batch["tokens", "input_ids"][:, 1:, None])[..., 0]
    expected = torch.nn.functional.pad(expected, (1, 0)).where(batch["loss_mask"], 0.0)
    same(actor.compute(batch, ("logprobs",), 0.8)["logprobs"], expected)
    loaded = make_actor(world, actor.strategy, make_optimizer(**OPTIMIZER), path=str(tmp_path))
    same(weights(loaded), weights(actor), 0.0)


@pytest.mark.parametrize(("known", "ends"), [(None, [1, 7]), ([1, 5], [1, 5, 7]), (7, [1, 7]), ([7, 1], [1, 7])])
def test_an_export_ends_where_answers_are_trained_to_end(known, ends, world):
    """At 7, beside the end tokens that the model knows and that of the tokenizer, 1."""
    actor = small_actor(world)
    model = actor.plain_model()
    model.generation_config.eos_token_id = known
    add_end_tokens(model, (7, 1))
    assert end_tokens(model, actor.tokenizer) == ends
    set_end_tokens(model, actor.tokenizer)
    assert model.generation_config.eos_token_id == ends


def test_generate_of_a_saved_model_ends_where_the_engine_ends(world, tmp_path):
    actor = small_actor(world)
    assert actor.plain_model().generation_config.eos_token_id is None, "the model is made from a config"
    actor.save_model(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), actor.tokenizer
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    prompts = [[first, second] for first in range(3, 13) for second in range(3, 13)]
    engine = hf_engine(model, tokenizer, 64)
    greedy = Sampling(max_new_tokens=24, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
    expected = [found[0].tokens for found in engine.generate([Request(prompt, [0]) for prompt in prompts], greedy)]
    found = model.generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False)[:, 2:].tolist()
    ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in found]
    assert [row[:end] for row, end in zip(found, ends, strict=True)] == expected
    assert min(ends) < 24, "some answers end before the limit"


def test_a_saved_critic_is_its_backbone(world, tmp_path):
    critic, batch = small_actor(world, "critic", "value"), make_batch()
    update(critic, batch, make_algorithm())
    critic.save_model(tmp_path)
    loaded = make_actor(world, critic.strategy, path=str(tmp_path), head="value", key="critic", seed=3)
    same(dict(loaded.weights()), dict(critic.weights()), 0.0)


def test_a_plain_model_takes_no_memory_until_it_is_given_weights(world):
    actor = small_actor(world, tie_word_embeddings=True)
    model = actor.plain_model()
    assert {parameter.untyped_storage().nbytes() for parameter in model.parameters()} == {4}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.load_state_dict(dict(actor.weights()), assign=True)
    batch = make_batch()
    ids = batch["tokens", "input_ids"]
    logp = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    same(actor.compute(batch, ("logprobs",), 1.0)["logprobs"][:, 1:], logp.where(batch["loss_mask"][:, 1:], 0.0), 1e-5)


@pytest.mark.parametrize(("key", "head"), [("actor", "lm"), ("critic", "value")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_restored_actor_goes_on_exactly(world, key, head, tied):
    batch, algorithm = make_batch(), make_algorithm()
    actor = small_actor(world, key, head, tie_word_embeddings=tied)
    for _ in range(2):
        update(actor, batch, algorithm)
    state = whole_state(actor)
    numbers = [update(actor, batch, algorithm) for _ in range(2)]
    other = small_actor(world, key, head, seed=9, tie_word_embeddings=tied)
    restore(other, state)
    assert [update(other, batch, algorithm) for _ in range(2)] == numbers
    same(weights(other), weights(actor), 0.0)


def test_a_new_stage_takes_the_weights_and_not_the_optimizer(world):
    batch, algorithm = make_batch(), make_algorithm()
    actor, other = small_actor(world), small_actor(world, seed=9)
    for _ in range(2):
        update(actor, batch, algorithm)
    restore(other, whole_state(actor), left_out=TRAINING_STATE)
    same(weights(other), weights(actor), 0.0)
    for each in (actor, other):
        each.begin_training(make_optimizer(**OPTIMIZER), 10)
    assert update(other, batch, algorithm) == update(actor, batch, algorithm)
    same(weights(other), weights(actor), 0.0)


def test_a_reference_holds_no_optimizer_and_no_gradients(world):
    reference = small_actor(world, "reference", trains=False)
    assert not any(parameter.requires_grad for parameter in reference.network.parameters())
    assert set(reference.state_dict()) == {"network", "as_loaded"}


def test_a_weight_that_is_not_finite_is_found_by_name(world):
    actor = small_actor(world)
    assert actor.nonfinite_tensor() is None
    name, weight = list(actor.network.named_parameters())[2]
    with torch.no_grad():
        weight.flatten()[3] = float("inf")
    assert actor.nonfinite_tensor() == name
