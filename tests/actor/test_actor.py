"""The actor against a plain PyTorch loop, and what an update must not depend on."""

import copy
import math

import pytest
import torch
from safetensors import safe_open
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft.actor.actor import Diverged
from rft.algorithm.method import Method, MethodOptions, idle_row
from rft.batch import collate
from rft.distributed import start
from rft.metrics import Metrics
from tests.defaults import make_actor, make_optimizer, make_strategy

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
OPTIMIZER = {
    "lr": 1e-3,
    "betas": [0.9, 0.95],
    "eps": 1e-5,  # a rounding error of the gradient is to stay one in the weights
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "schedule": "linear",
    "warmup_updates": 0,
    "final_lr": 0.0,
}
LENGTHS = [5, 9, 3, 12, 7, 4, 10, 6]
ALL = 10**6


@pytest.fixture(scope="module")
def world():
    torch.set_num_threads(1)
    return start("cpu")


def make(world, key="actor", head="lm", cap=ALL, seed=0, trains=True, reshard=True, **model):
    optimizer = make_optimizer(**OPTIMIZER) if trains else None
    strategy = make_strategy(world, reshard_after_forward=reshard)
    shape = {"head": head, "micro_batch_tokens": cap, "model_config": MODEL | model}
    actor = make_actor(world, strategy, optimizer, key=key, seed=seed, **shape)
    if optimizer is not None:
        actor.begin_training(optimizer, updates=10)
    return actor


def make_method(loss=None, terms=None, aggregation="seq_mean_token_mean"):
    clip = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
    return Method(
        MethodOptions(
            name="test",
            group_size=2,
            source=None,
            advantage=None,
            loss=loss or clip,
            terms={} if terms is None else terms,
            aggregation={"name": aggregation},
            shaping={},
            reward_kl=None,
            critic_loss={"name": "value", "clip": 0.2},
            prm_loss=None,
            critic_warmup=0,
            correction=None,
            gradient_mask=None,
            old_logprobs="actor",
            mask_truncated=False,
            mask_tied=False,
            resample_power=None,
        ),
        "algorithm",
    )


TERMS = {"kl": {"name": "kl", "estimator": "k3", "coef": 0.1}, "entropy": {"name": "entropy", "coef": 0.02}}


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 19, (length,), generator=generator)
        trains = torch.rand(length, generator=generator) < 0.7
        trains[0] = False
        trains[-1] = True
        columns = {
            name: torch.where(trains, torch.randn(length, generator=generator), 0.0)
            for name in ("advantages", "values", "returns")
        }
        columns |= {
            name: torch.where(trains, -3 + 0.3 * torch.randn(length, generator=generator), 0.0)
            for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
        }
        row = {
            "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            "response_mask": trains,
            "group": number // 2,
            "unit": number,
            "truncated": False,
        }
        rows.append(row | columns)
    batch = collate(rows)
    batch["keep"] = batch["response_mask"].clone()
    return batch


def update(actor, batch, method, temperature=0.8, idle=None, watch=(), compare=False):
    """One update; the numbers that it logged."""
    metrics = Metrics()
    rows = batch.clone()
    method.weigh(rows, actor.world.all_sum)
    objective = method.policy if actor.key == "actor" else method.learners["critic"]
    actor.update(rows, idle_row(batch if idle is None else idle, rows), objective, temperature, metrics, watch, compare)
    return metrics.reduce(actor.world.gather)


def weights(actor):
    tensors = actor.network.state_dict().items()
    return {name: tensor.detach().clone() for name, tensor in actor.strategy.full_tensors(tensors)}


def same(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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
    actor, method, batch = make(world, cap=30, tie_word_embeddings=tied), make_method(terms=TERMS), make_batch()
    model = plain_copy(actor)
    adamw = plain_adamw(model)
    for number in range(3):
        numbers = update(actor, batch, method, temperature=0.8)

        total = {"ppo_clip": 0.0, "kl": 0.0, "entropy": 0.0}
        for row in range(len(batch)):
            length = LENGTHS[row]
            ids, keep = batch["tokens", "input_ids"][row, :length], batch["keep"][row, 1:length]
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
    critic, method, batch = make(world, key="critic", head="value"), make_method(aggregation="token_mean"), make_batch()
    before = weights(critic)
    numbers = [update(critic, batch, method) for _ in range(3)]
    keep = batch["keep"]
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
    batch, method = make_batch(), make_method(**options)
    one, other = make(world, key, head), make(world, key, head, cap=12 if change == "small micro-batches" else ALL)
    moved = batch
    if change == "row order":
        moved = batch[torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])]
    elif change == "padding":
        moved = wider(batch)
    watch = ("entropy",) if head == "lm" else ()
    for _ in range(3):
        first, second = update(one, batch, method, watch=watch), update(other, moved, method, watch=watch)
        del first["padding/waste"], second["padding/waste"]
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    same(weights(other), weights(one))


def wider(batch):
    """The batch as if it had a row longer than all of these."""
    pad = torch.nn.functional.pad
    columns = {name: pad(c, (0, 9)) if c.dim() > 1 else c for name, c in batch.exclude("tokens").items()}
    tokens = TensorDict({name: pad(c, (0, 9)) for name, c in batch["tokens"].items()}, batch_size=[len(batch)])
    return TensorDict(columns | {"tokens": tokens}, batch_size=[len(batch)])


def test_an_idle_row_contributes_nothing(world):
    """A rank with nothing left to do runs a row of weight zero, whatever it holds."""
    batch, method = make_batch(), make_method(terms=TERMS)
    one, other = make(world, cap=40), make(world, cap=40)
    other.world = copy.copy(world)
    other.world.gather = lambda thing: [thing, thing + 2] if isinstance(thing, int) else [thing]  # others have two more
    first, second = update(one, batch, method), update(other, batch, method, idle=batch[3:4])
    assert second.pop("padding/waste") < first.pop("padding/waste")
    assert second == pytest.approx(first, rel=1e-6)
    same(weights(other), weights(one), 0.0)


def test_a_rank_without_rows_takes_part(world):
    batch, method = make_batch(), make_method(terms=TERMS)
    actor = make(world)
    actor.world = copy.copy(world)
    actor.world.gather = lambda thing: [thing, 2] if isinstance(thing, int) else [thing]
    before = weights(actor)
    numbers = update(actor, batch[:0], method, idle=batch)
    assert numbers["grad_norm"] == 0.0
    assert not any(name.startswith("clip/") for name in numbers)
    decay = {name: 1 - 1e-3 * 0.1 if tensor.dim() > 1 else 1.0 for name, tensor in before.items()}
    same(weights(actor), {name: tensor * decay[name] for name, tensor in before.items()}, 1e-7)


@pytest.mark.parametrize("cap", [12, 30, ALL])
@pytest.mark.parametrize("output", ["logprobs", "entropy", "values"])
def test_compute_gives_every_row_its_column(world, output, cap):
    actor = make(world, head="value" if output == "values" else "lm", cap=cap, trains=False)
    with torch.no_grad():
        for parameter in actor.network.parameters():
            parameter += 0.1
    batch = make_batch()
    column = actor.compute(batch, (output,), 0.8)[output]
    assert not column.requires_grad
    assert column.shape == batch["keep"].shape
    assert (column != 0).equal(batch["keep"])
    expected = actor.network(batch["tokens"], batch["keep"], (output,), 0.8)[output]
    same(column, expected, 1e-5)


def test_old_logprobs_are_those_of_the_moment_where_none_are_given(world):
    """Then every ratio is 1: nothing is clipped and the gradient is the same as with the column written first."""
    batch, method = make_batch(), make_method()
    one, other = make(world, cap=30), make(world, cap=30)
    batch["old_logprobs"] = one.compute(batch, ("logprobs",), 0.8)["logprobs"]
    without = batch.exclude("old_logprobs")
    first, second = update(one, batch, method), update(other, without, method)
    assert second["clip/high"] == second["clip/low"] == 0.0
    assert second["kl/old"] == pytest.approx(0.0, abs=1e-9)
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    same(weights(other), weights(one))


def test_the_gap_to_the_rollout_policy_is_that_before_the_update(world):
    batch, method, actor = make_batch(), make_method(), make(world, cap=30)
    now = actor.compute(batch, ("logprobs",), 0.8)["logprobs"]
    gap = (now - batch["rollout_logprobs"])[batch["keep"]]
    numbers = update(actor, batch, method, compare=True)
    assert numbers["rollout/logprob_gap"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert numbers["rollout/kl"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), rel=1e-4)


def test_statistics_are_means_over_trained_tokens(world):
    batch, method, actor = make_batch(), make_method(terms=TERMS), make(world, cap=12)
    keep = batch["keep"]
    now, entropy = (actor.compute(batch, (output,), 0.8)[output][keep] for output in ("logprobs", "entropy"))
    numbers = update(actor, batch, method, watch=("entropy",))
    ratio, advantages = (now - batch["old_logprobs"][keep]).exp(), batch["advantages"][keep]
    high = ((advantages > 0) & (ratio > 1.3)).double().mean()
    assert 0 < high < 1
    assert numbers["clip/high"] == pytest.approx(float(high))
    assert numbers["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    d = now - batch["ref_logprobs"][keep]
    assert numbers["kl/ref"] == pytest.approx(float(((-d).exp() - 1 + d).mean()), rel=1e-5)


def test_waste_is_the_share_of_padding(world):
    numbers = update(make(world), make_batch(), make_method())
    assert numbers["padding/waste"] == pytest.approx(1 - sum(LENGTHS) / (8 * 12))


@pytest.mark.parametrize(
    ("column", "key", "head"),
    [("advantages", "actor", "lm"), ("old_logprobs", "actor", "lm"), ("returns", "critic", "value")],
)
def test_a_column_that_is_not_finite_stops_the_run(world, column, key, head):
    batch, method = make_batch(), make_method()
    actor = make(world, key, head, cap=12)
    update(actor, batch, method)
    before, moments = weights(actor), copy.deepcopy(actor.optimizer.state_dict()["state"])
    bad = batch.clone()
    for row in (2, 6):
        bad[column][row, LENGTHS[row] - 1] = math.nan
    with pytest.raises(Diverged) as caught:
        update(actor, bad, method)
    assert caught.value.actor == key
    assert caught.value.suspects == {column: [2, 6]}
    assert caught.value.batch[column].isnan().sum() == 2
    same(weights(actor), before, 0.0)
    same(actor.optimizer.state_dict()["state"], moments, 0.0)
    fresh = make(world, key, head, cap=12)
    update(fresh, batch, method)
    assert update(actor, batch, method) == update(fresh, batch, method), "it can go on as if nothing had been"


def test_a_model_that_is_not_finite_is_found_out(world):
    actor, batch = make(world, trains=True), make_batch()
    with torch.no_grad():
        next(iter(actor.weights()))[1][int(batch["tokens", "input_ids"][1, 0])] = math.inf  # one token's embedding
    with pytest.raises(Diverged) as caught:
        update(actor, batch, make_method(), watch=("entropy",))
    assert set(caught.value.suspects) == {"logprobs", "entropy"}
    assert 1 in caught.value.suspects["logprobs"]


def test_a_unit_over_the_cap_is_refused(world):
    with pytest.raises(ValueError, match=r"actor\.micro_batch_tokens=8 .* to at least 12"):
        make(world, cap=8).compute(make_batch(), ("logprobs",), 1.0)["logprobs"]


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_start_like_takes_over_the_weights(world, head, tied, reshard):
    """Also where blocks stay gathered after a forward that no backward followed."""
    batch = make_batch()
    policy = make(world, seed=1, reshard=reshard, tie_word_embeddings=tied)
    key, output = {"lm": ("actor", "logprobs"), "value": ("critic", "values")}[head]
    other = make(world, key, head, seed=2, reshard=reshard, tie_word_embeddings=tied)
    for actor, name in ((policy, "logprobs"), (other, output)):
        actor.compute(batch, (name,), 1.0)[name]
    other.start_like(policy)
    theirs = {name.removeprefix("model."): tensor for name, tensor in policy.weights()}
    for name, tensor in other.weights():
        assert torch.equal(tensor, theirs[name.removeprefix("model.")])
    if head == "lm":
        assert torch.equal(
            other.compute(batch, ("logprobs",), 1.0)["logprobs"], policy.compute(batch, ("logprobs",), 1.0)["logprobs"]
        )
    before = weights(policy)
    other.begin_training(make_optimizer(**OPTIMIZER), 10)
    update(other, batch, make_method())
    same(weights(policy), before, 0.0)


def test_start_like_refuses_another_shape(world):
    policy, critic = make(world), make(world, "critic", "value", hidden_size=32)
    with pytest.raises(ValueError, match=r"^critic\.path: the weights .* differ in shape from those of actor\.path"):
        critic.start_like(policy)


def test_training_goes_on_after_a_forward_without_a_backward_that_keeps_its_blocks(world):
    """An optimizer that is made in between holds the sharded weights all the same."""
    batch, method = make_batch(), make_method()
    one, other = make(world), make(world, reshard=False)
    for actor in (one, other):
        actor.compute(batch, ("logprobs",), 1.0)["logprobs"]
        actor.begin_training(make_optimizer(**OPTIMIZER), 10)
        for _ in range(2):
            update(actor, batch, method)
            actor.compute(batch, ("logprobs",), 1.0)["logprobs"]
    same(weights(other), weights(one))
    assert not torch.equal(weights(other)["model.lm_head.weight"], weights(make(world))["model.lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_loaded_by_transformers(world, tmp_path, monkeypatch, tied):
    actor, batch = make(world, tie_word_embeddings=tied), make_batch()
    update(actor, batch, make_method())
    of_ranks = [(name, tensor.clone()) for name, tensor in actor.weights()]  # gathered: ties are copies
    monkeypatch.setattr(actor, "weights", lambda: iter(of_ranks))
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
    expected = torch.nn.functional.pad(expected, (1, 0)).where(batch["keep"], 0.0)
    same(actor.compute(batch, ("logprobs",), 0.8)["logprobs"], expected)
    loaded = make_actor(world, actor.strategy, make_optimizer(**OPTIMIZER), path=str(tmp_path))
    same(weights(loaded), weights(actor), 0.0)


def test_a_saved_critic_is_its_backbone(world, tmp_path):
    critic, batch = make(world, "critic", "value"), make_batch()
    update(critic, batch, make_method())
    critic.save_model(tmp_path)
    loaded = make(world, "critic", "value", seed=3)
    loaded.start_like(make_actor(world, critic.strategy, path=str(tmp_path)))
    same(dict(loaded.weights()), dict(critic.weights()), 0.0)


def test_a_plain_model_takes_no_memory_until_it_is_given_weights(world):
    actor = make(world, tie_word_embeddings=True)
    model = actor.plain_model()
    assert {parameter.untyped_storage().nbytes() for parameter in model.parameters()} == {4}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.load_state_dict(dict(actor.weights()), assign=True)
    batch = make_batch()
    ids = batch["tokens", "input_ids"]
    logp = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    same(actor.compute(batch, ("logprobs",), 1.0)["logprobs"][:, 1:], logp.where(batch["keep"][:, 1:], 0.0), 1e-5)


@pytest.mark.parametrize(("key", "head"), [("actor", "lm"), ("critic", "value")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_restored_actor_goes_on_exactly(world, tmp_path, key, head, tied):
    batch, method = make_batch(), make_method()
    actor = make(world, key, head, tie_word_embeddings=tied)
    for _ in range(2):
        update(actor, batch, method)
    torch.save(actor.state_dict(), tmp_path / "state.pt")
    numbers = [update(actor, batch, method) for _ in range(2)]
    other = make(world, key, head, seed=9, tie_word_embeddings=tied)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False), with_optimizer=True)
    assert [update(other, batch, method) for _ in range(2)] == numbers
    same(weights(other), weights(actor), 0.0)


def test_a_new_stage_takes_the_weights_and_not_the_optimizer(world):
    batch, method = make_batch(), make_method()
    actor, other = make(world), make(world, seed=9)
    for _ in range(2):
        update(actor, batch, method)
    other.load_state_dict(actor.state_dict(), with_optimizer=False)
    same(weights(other), weights(actor), 0.0)
    actor.begin_training(make_optimizer(**OPTIMIZER), 10)
    assert update(other, batch, method) == update(actor, batch, method)
    same(weights(other), weights(actor), 0.0)


def test_a_reference_holds_no_optimizer_and_no_gradients(world):
    reference = make(world, "reference", trains=False)
    assert not any(parameter.requires_grad for parameter in reference.network.parameters())
    assert set(reference.state_dict()) == {"network"}
