"""Updates of the actor against a plain PyTorch loop, what they must not depend on, and what stops them."""

import copy
import math
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft.actor.base import ModelHooks, NonFiniteError
from rft.metrics import Metrics
from tests.helpers import (
    ALL,
    LENGTHS,
    TERMS,
    make_algorithm,
    make_batch,
    plain_algorithm,
    same,
    small_actor,
    update,
    weights,
    wider,
)


def plain_copy(actor):
    """The same weights in a model that knows nothing of FSDP."""
    model = AutoModelForCausalLM.from_config(actor._plain.config, dtype=torch.float32)
    model.load_state_dict(dict(actor.weights()))
    return model


def plain_adamw(model):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_updates_are_those_of_a_plain_loop(world, tied):
    actor, algorithm, batch = (
        small_actor(world, cap=30, tie_word_embeddings=tied),
        make_algorithm(terms=TERMS),
        make_batch(),
    )
    model = plain_copy(actor)
    adamw = plain_adamw(model)
    for number in range(3):
        numbers = update(actor, batch, algorithm, temperature=0.8)

        total = {"ppo_clip": 0.0, "kl": 0.0, "entropy": 0.0}
        for row in range(len(batch)):
            length = LENGTHS[row]
            ids, keep = batch["tokens", "input_ids"][row, :length], batch["loss_mask"][row, 1:length]
            logp = (model(input_ids=ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
            now = logp.gather(1, ids[1:, None])[:, 0][keep]
            old, ref, advantage = (
                batch[name][row, 1:length][keep] for name in ("old_logprobs", "ref_logprobs", "advantages")
            )
            ratio = (now - old).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
            kl = (ref - now).exp() - 1 - (ref - now)
            total["ppo_clip"] += loss.mean() / len(batch)
            total["kl"] += kl.mean() / len(batch)
            total["entropy"] += (logp.exp() * logp).sum(-1)[keep].mean() / len(batch)
        (total["ppo_clip"] + 0.1 * total["kl"] + 0.02 * total["entropy"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * (1 - number / 10)
        adamw.step()
        adamw.zero_grad()

        assert norm > 0.05, "the clipping is to matter"
        assert numbers["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert numbers["lr"] == pytest.approx(1e-3 * (1 - number / 10))
        for name, value in total.items():
            assert numbers[f"loss/{name}"] == pytest.approx(float(value.detach()), rel=1e-5, abs=1e-7)
        same(dict(actor.weights()), model.state_dict())


def test_the_critic_learns_its_returns(world):
    critic, algorithm, batch = (
        small_actor(world, key="critic", head="value"),
        make_algorithm(aggregation="token_mean"),
        make_batch(),
    )
    before = weights(critic)
    numbers = [update(critic, batch, algorithm) for _ in range(3)]
    keep = batch["loss_mask"]
    plain = (0.0 - batch["returns"][keep]).square()
    near = (batch["values"][keep] + (-batch["values"][keep]).clamp(-0.2, 0.2) - batch["returns"][keep]).square()
    assert numbers[0]["loss/value"] == pytest.approx(float(0.5 * torch.maximum(plain, near).mean()), rel=1e-5)
    assert numbers[2]["loss/value"] < numbers[0]["loss/value"]
    assert {"critic/grad_norm", "critic/lr"} <= set(numbers[0]) and "grad_norm" not in numbers[0]
    assert not torch.equal(weights(critic)["head.weight"], before["head.weight"])


CASES = {
    "ppo_clip and terms": ("lm", {"terms": TERMS}),
    "gspo": ("lm", {"loss": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2}, "aggregation": "group_mean"}),
    "nll": ("lm", {"loss": {"name": "nll"}, "aggregation": "token_mean"}),
    "value": ("value", {"aggregation": "token_mean"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("change", ["small micro-batches", "row order", "padding"])
def test_an_update_does_not_depend_on(world, case, change):
    head, options = CASES[case]
    key = {"lm": "actor", "value": "critic"}[head]
    batch, algorithm = make_batch(), make_algorithm(**options)
    one, other = (
        small_actor(world, key, head),
        small_actor(world, key, head, cap=12 if change == "small micro-batches" else ALL),
    )
    moved = batch
    if change == "row order":
        moved = batch[torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])]
    elif change == "padding":
        moved = wider(batch)
    watch = ("entropy",) if head == "lm" else ()
    for _ in range(3):
        first, second = update(one, batch, algorithm, watch=watch), update(other, moved, algorithm, watch=watch)
        del first["padding/waste"], second["padding/waste"]
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    same(weights(other), weights(one))


@pytest.mark.parametrize("packing", [False, True])
def test_an_idle_row_contributes_nothing(world, packing):
    """A rank with nothing left to do runs the first token of a row, whatever it holds."""
    batch, algorithm = make_batch(), make_algorithm(terms=TERMS)
    one, other = (small_actor(world, cap=40, rows={"packing": packing}) for _ in range(2))
    other.world = copy.copy(world)
    other.world.gather = lambda thing: [thing, thing + 8] if isinstance(thing, int) else [thing]  # others have more
    first, second = update(one, batch, algorithm), update(other, batch, algorithm, dummy=batch[3:4])
    assert (first["padding/waste"] > 0.0) is not packing
    assert second == pytest.approx(first, rel=1e-6)
    same(weights(other), weights(one), 1e-6 if packing else 0.0)  # packed rows spread over as many as others have


def test_a_rank_without_rows_takes_part(world):
    batch, algorithm = make_batch(), make_algorithm(terms=TERMS)
    actor = small_actor(world)
    actor.world = copy.copy(world)
    own = (0, 0)  # micro-batches, and tokens of the largest unit
    actor.world.gather = lambda thing: [own, (2, 0)] if thing == own else [thing]
    before = weights(actor)
    numbers = update(actor, batch[:0], algorithm, dummy=batch)
    assert numbers["grad_norm"] == 0.0
    assert not any(name.startswith("clip/") for name in numbers)
    decay = {name: 1 - 1e-3 * 0.1 if tensor.dim() > 1 else 1.0 for name, tensor in before.items()}
    same(weights(actor), {name: tensor * decay[name] for name, tensor in before.items()}, 1e-7)


@pytest.mark.parametrize("cap", [12, 30, ALL])
@pytest.mark.parametrize("output", ["logprobs", "entropy", "values"])
@pytest.mark.parametrize("packing", [False, True])
def test_compute_gives_every_row_its_column(world, output, cap, packing):
    head = "value" if output == "values" else "lm"
    actor, plain = (small_actor(world, head=head, cap=cap, trains=False, rows={"packing": p}) for p in (packing, False))
    with torch.no_grad():
        for parameter in (*actor.network.parameters(), *plain.network.parameters()):
            parameter += 0.1
    batch = make_batch()
    column = actor.compute(batch, (output,), 0.8)[output]
    assert not column.requires_grad
    assert column.shape == batch["loss_mask"].shape
    assert (column != 0).equal(batch["loss_mask"])
    same(column, plain.network(batch["tokens"], batch["loss_mask"], (output,), 0.8)[output], 1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_observed_tokens_have_outputs_and_train_the_term_echo(world, packing):
    batch = make_batch()
    observed = batch["tokens", "attention_mask"].bool() & ~batch["loss_mask"]
    observed[:, 0] = False
    batch["observation_mask"], batch["scores"] = observed, torch.zeros(len(batch))
    actor = small_actor(world, cap=30, rows={"packing": packing})
    with torch.no_grad():
        for parameter in actor.network.parameters():
            parameter += 0.1
    column = actor.compute(batch, ("logprobs",), 0.8)["logprobs"]
    assert (column != 0).equal(batch["loss_mask"] | observed)
    algorithm = plain_algorithm(terms={"echo": {"name": "echo", "coef": 1.0}}, critic_loss=None)
    algorithm.prepare({"logprobs": column}, batch, world.all_sum, 0, Metrics())
    first, second = update(actor, batch, algorithm), update(actor, batch, algorithm)
    assert first["loss/echo"] == pytest.approx(-column[observed].mean().item(), rel=1e-5)
    assert second["loss/echo"] < first["loss/echo"]


def test_old_logprobs_are_those_of_the_moment_where_none_are_given(world):
    """Then every ratio is 1: nothing is clipped and the gradient is the same as with the column written first."""
    batch, algorithm = make_batch(), make_algorithm()
    one, other = small_actor(world, cap=30), small_actor(world, cap=30)
    batch["old_logprobs"] = one.compute(batch, ("logprobs",), 0.8)["logprobs"]
    without = batch.exclude("old_logprobs")
    first, second = update(one, batch, algorithm), update(other, without, algorithm)
    assert second["clip/high"] == second["clip/low"] == 0.0
    assert second["kl/old"] == pytest.approx(0.0, abs=1e-9)
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    same(weights(other), weights(one))


def test_the_gap_to_the_rollout_policy_is_that_before_the_update(world):
    batch, algorithm, actor = make_batch(), make_algorithm(), small_actor(world, cap=30)
    now = actor.compute(batch, ("logprobs",), 0.8)["logprobs"]
    gap = (now - batch["rollout_logprobs"])[batch["loss_mask"]]
    numbers = update(actor, batch, algorithm, log_mismatch=True)
    assert numbers["rollout/logprob_gap"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert numbers["rollout/kl"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), rel=1e-4)


def test_statistics_are_means_over_trained_tokens(world):
    batch, algorithm, actor = make_batch(), make_algorithm(terms=TERMS), small_actor(world, cap=12)
    keep = batch["loss_mask"]
    now, entropy = (actor.compute(batch, (output,), 0.8)[output][keep] for output in ("logprobs", "entropy"))
    numbers = update(actor, batch, algorithm, watch=("entropy",))
    ratio, advantages = (now - batch["old_logprobs"][keep]).exp(), batch["advantages"][keep]
    high = ((advantages > 0) & (ratio > 1.3)).double().mean()
    assert 0 < high < 1
    assert numbers["clip/high"] == pytest.approx(float(high))
    assert numbers["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    d = now - batch["ref_logprobs"][keep]
    assert numbers["kl/ref"] == pytest.approx(float(((-d).exp() - 1 + d).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("column", "key", "head"),
    [("advantages", "actor", "lm"), ("old_logprobs", "actor", "lm"), ("returns", "critic", "value")],
)
def test_a_column_that_is_not_finite_stops_the_run(world, column, key, head):
    batch, algorithm = make_batch(), make_algorithm()
    actor = small_actor(world, key, head, cap=12)
    update(actor, batch, algorithm)
    before, moments = weights(actor), copy.deepcopy(actor.train_state.optimizer.state_dict()["state"])
    bad = batch.clone()
    for row in (2, 6):
        bad[column][row, LENGTHS[row] - 1] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        update(actor, bad, algorithm)
    assert caught.value.actor == key
    assert caught.value.suspects == {column: [2, 6]}
    assert caught.value.batch[column].isnan().sum() == 2
    same(weights(actor), before, 0.0)
    same(actor.train_state.optimizer.state_dict()["state"], moments, 0.0)
    fresh = small_actor(world, key, head, cap=12)
    update(fresh, batch, algorithm)
    assert update(actor, batch, algorithm) == update(fresh, batch, algorithm), "it can go on as if nothing had been"


def test_a_model_that_is_not_finite_is_found_out(world):
    actor, batch = small_actor(world, trains=True), make_batch()
    with torch.no_grad():
        next(iter(actor.weights()))[1][int(batch["tokens", "input_ids"][1, 0])] = math.inf  # one token's embedding
    with pytest.raises(NonFiniteError) as caught:
        update(actor, batch, make_algorithm(), watch=("entropy",))
    assert set(caught.value.suspects) == {"logprobs", "entropy"}
    assert 1 in caught.value.suspects["logprobs"]


def test_a_unit_over_the_cap_is_refused(world):
    with pytest.raises(ValueError, match=r"^actor\.micro_batch_tokens=8: .* to at least 12$"):
        small_actor(world, cap=8).compute(make_batch(), ("logprobs",), 1.0)["logprobs"]


class Copies(ModelHooks):
    """Records when each micro-batch is copied to the device, and how many are there then."""

    def __init__(self):
        self.calls, self.held, self._micros = [], [], []

    def on_micro_batches(self, model, micro_batches):
        for micro in micro_batches:
            self.calls.append("copied")
            self._micros.append(weakref.ref(micro.batch["tokens", "input_ids"]))
            self.held.append(sum(reference() is not None for reference in self._micros))
            yield micro


@pytest.mark.parametrize(("key", "head", "output"), [("actor", "lm", "logprobs"), ("critic", "value", "values")])
@pytest.mark.parametrize("trains", [False, True])
def test_the_next_micro_batch_is_copied_before_one_is_computed(world, key, head, output, trains):
    copies, batch, actor = Copies(), make_batch(), small_actor(world, key, head, cap=12)
    actor.context = replace(actor.context, hooks=copies)
    actor.network.register_forward_pre_hook(lambda *_: copies.calls.append("computed"))
    if trains:
        update(actor, batch, make_algorithm())
    else:
        actor.compute(batch, (output,), 1.0)
    count = len(copies.held)
    assert count > 3
    assert copies.calls == ["copied", *["copied", "computed"] * (count - 1), "computed"]
    assert max(copies.held) == 2
