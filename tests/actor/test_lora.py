"""Adapters: what trains, what they compute, where their weights go, and a reference that needs no second model."""

import copy
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rft.actor.nf4 import PackedLinear
from rft.actor.reference import AdapterReference
from rft.algorithm.method import Method, MethodOptions, idle_row
from rft.build import Job
from rft.distributed import start
from rft.metrics import Metrics
from rft.rollout.engine import Request, Sampling
from rft.rollout.hf import HFEngine
from rft.trainer import Trainer
from tests.actor import lora_on_ranks
from tests.actor.lora_on_ranks import JOBS, SHARES, lora_options
from tests.defaults import make_actor, make_optimizer, make_strategy
from tests.strategy.jobs import METHOD, MODEL, OPTIMIZER, close, make_batch

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def world():
    torch.set_num_threads(1)
    return start("cpu")


def make(world, lora=None, key="actor", head="lm", trains=True, seed=0, **changes):
    """An actor; with adapters where `lora` is their options that differ from the yaml."""
    optimizer = make_optimizer(**OPTIMIZER) if trains else None
    model = {"model_config": MODEL} if "path" not in changes else {}
    options = {"lora": None if lora is None else lora_options(**lora), "head": head} | model | changes
    strategy = options.pop("strategy", None) or make_strategy(world)
    actor = make_actor(world, strategy, optimizer, key=key, seed=seed, **options)
    if optimizer is not None:
        actor.begin_training(optimizer, 10)
    return actor


def update(actor, batch, count=1):
    method, metrics = Method(MethodOptions(**METHOD), "algorithm"), Metrics()
    for _ in range(count):
        rows = batch.clone()
        method.weigh(rows, actor.world.all_sum)
        objective = {"critic": method.learners["critic"]}.get(actor.key, method.policy)
        actor.update(rows, idle_row(batch, rows), objective, 0.8, metrics)
    return metrics.reduce(actor.world.gather)


def weights(actor):
    return {name: tensor.clone() for name, tensor in actor.weights()}


def same(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def logprobs(actor, batch):
    return actor.compute(batch, ("logprobs",), 0.8)["logprobs"]


def held(actor):
    return sum(parameter.to_local().nbytes for parameter in actor.network.parameters())


# What trains


def test_adapters_alone_train_and_begin_without_effect(world):
    plain, actor, batch = make(world), make(world, {}), make_batch()
    assert torch.equal(logprobs(actor, batch), logprobs(plain, batch))
    same(weights(actor), weights(plain), 0.0)
    before = {name: tensor.clone() for name, tensor in actor.network.state_dict().items()}
    update(actor, batch, 2)
    moved = {name for name, tensor in actor.network.state_dict().items() if not torch.equal(tensor, before[name])}
    trains = {name for name, parameter in actor.network.named_parameters() if parameter.requires_grad}
    layers = [f"model.model.layers.{n}.{'mlp' if m in LINEAR[4:] else 'self_attn'}.{m}" for n in (0, 1) for m in LINEAR]
    assert moved == trains == {f"{name}.lora_{part}.default.weight" for name in layers for part in "AB"}
    assert {p.dtype for p in actor.network.parameters()} == {torch.float32}
    assert not torch.allclose(logprobs(actor, batch), logprobs(plain, batch), atol=1e-3)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 3), (True, 8 / math.sqrt(3))])
def test_the_gradient_is_that_of_the_product_of_the_matrices(world, rslora, scale):
    """For W + scale B A: that of B is scale dW A', that of A is scale B' dW."""
    seen = {}

    def watched(actor):
        def clip(parameters, max_norm):
            named = [(name, p) for name, p in actor.network.named_parameters() if p.grad is not None]
            seen.update({name: p.grad.full_tensor().clone() for name, p in named})
            return type(actor.strategy).clip_grad_norm(actor.strategy, parameters, max_norm)

        actor.strategy.clip_grad_norm = clip
        update(actor, make_batch())

    actor, plain = make(world, {"alpha": 8, "rslora": rslora}), make(world)
    update(actor, make_batch(), 2)  # B is not zero any more
    plain.start_like(actor)
    same(weights(plain), weights(actor), 0.0)
    now = {name: tensor.to_local().clone() for name, tensor in actor.network.state_dict().items()}
    watched(actor)
    watched(plain)
    for name in [name.removesuffix(".base_layer.weight") for name in now if "base_layer" in name]:
        a, b, slope = now[f"{name}.lora_A.default.weight"], now[f"{name}.lora_B.default.weight"], seen[f"{name}.weight"]
        found = {part: seen[f"{name}.lora_{part}.default.weight"] for part in "AB"}
        close(found, {"A": scale * b.T @ slope, "B": scale * slope @ a.T})


def test_the_optimizer_holds_moments_of_the_adapters_alone(world):
    actor = make(world, {"rank": 2})
    update(actor, make_batch())
    moments = [value for state in actor.optimizer.state.values() for value in state.values() if value.dim() > 0]
    sizes = [(16, 20), (8, 20), (8, 20), (20, 16), (24, 20), (24, 20), (20, 24)]
    assert sum(moment.to_local().nbytes for moment in moments) == 2 * 4 * 2 * 2 * sum(sum(size) for size in sizes)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj"], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (["layers.0.mlp.*", "1.self_attn.v_proj"], [*(f"0.mlp.{m}" for m in LINEAR[4:]), "1.self_attn.v_proj"]),
        (["*_proj"], [f"{n}.{'mlp' if m in LINEAR[4:] else 'self_attn'}.{m}" for n in (0, 1) for m in LINEAR]),
    ],
)
def test_targets_are_patterns_of_the_ends_of_names(world, targets, layers):
    actor = make(world, {"targets": targets})
    assert set(actor.adapters.layers) == {f"model.layers.{name}" for name in layers}


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["lm_head"], "actor.lora.targets: 'lm_head' takes in the head, whose weight"),
        (["q_proj", "*"], "actor.lora.targets: '*' takes in the head, whose weight"),
        (["q_porj"], "actor.lora.targets: 'q_porj' is no linear layer of the model (there are: down_proj, gate_proj,"),
        (["embed_tokens"], "actor.lora.targets: 'embed_tokens' is no linear layer of the model"),
    ],
)
def test_targets_that_cannot_be_are_refused_before_weights_are_read(world, targets, said, monkeypatch):
    monkeypatch.setattr("rft.actor.actor.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError) as caught:
        make(world, {"targets": targets})
    assert str(caught.value).startswith(said)


# Where the weights go


def test_the_engine_computes_what_the_trainer_computes(world):
    """After every update; the weights beside the adapters are not copied, the merged ones are copies."""
    actor, batch = make(world, {"targets": ["q_proj", "mlp.*"]}), make_batch()
    engine = HFEngine(actor.plain_model(), actor.tokenizer, max_rows=8)
    assert not any("lora" in name or "base_layer" in name for name in engine.model.state_dict())
    greedy = Sampling(6, temperature=0.8, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
    prompt, seen = [3, 4, 5], []
    for step in range(3):
        engine.update_weights(step, actor.weights())
        [[found]] = engine.generate([Request(prompt, [7])], greedy)
        rows = make_batch()[:1]
        text = torch.tensor(prompt + found.tokens)[None]
        rows["tokens"] = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        rows = rows.select("tokens", "unit", "group", "response_mask")
        rows["response_mask"] = rows["keep"] = (torch.arange(text.shape[1]) >= len(prompt))[None]
        same(logprobs(actor, rows)[0, len(prompt) :], torch.tensor(found.logprobs), 1e-5)
        seen.append(found.logprobs)
        update(actor, batch)
    assert seen[0] != seen[1] != seen[2]
    own = {tensor.to_local().data_ptr() for tensor in actor.network.state_dict().values()}
    copied = {name for name, tensor in engine.model.state_dict().items() if tensor.data_ptr() not in own}
    assert copied == {f"{name}.weight" for name in actor.adapters.layers}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("export", "quantize"), [("merged", None), ("adapter", None), ("merged", "nf4")])
def test_a_saved_model_is_loaded_by_its_library(world, tmp_path, export, quantize, tied):
    base = make(world, model_config=MODEL | {"tie_word_embeddings": tied}, seed=4)
    base.save_model(tmp_path / "base")
    actor, batch = make(world, {"export": export, "quantize": quantize}, path=str(tmp_path / "base")), make_batch()
    update(actor, batch, 2)
    actor.save_model(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert ("model.safetensors" in files) is (export == "merged") and "tokenizer.json" in files
    if export == "merged":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        assert sum(tensor.numel() for tensor in tensors.values()) == 3 * 2 * 260
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "saved")
        assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    ids = batch["tokens", "input_ids"]
    theirs = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    ours = actor.compute(batch, ("logprobs",), 1.0)["logprobs"][:, 1:]
    same(ours, theirs.where(batch["keep"][:, 1:], 0.0), 1e-5)
    assert model.dtype == torch.float32
    assert not torch.allclose(ours, base.compute(batch, ("logprobs",), 1.0)["logprobs"][:, 1:], atol=1e-3)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_state_holds_what_trains_and_goes_on_exactly(world, tmp_path, head):
    key, batch = {"lm": "actor", "value": "critic"}[head], make_batch()
    tied = {"model_config": MODEL | {"tie_word_embeddings": True}}
    actor, other = (make(world, {}, key, head, **tied) for _ in range(2))
    update(actor, batch, 2)
    torch.save(actor.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=False)
    assert set(state["network"]) == {name for name, p in actor.network.named_parameters() if p.requires_grad}
    other.load_state_dict(state, with_optimizer=True)
    assert update(actor, batch, 2) == update(other, batch, 2)
    same(weights(other), weights(actor), 0.0)


def test_a_state_without_a_weight_that_trains_is_refused(world):
    actor = make(world, {})
    state = actor.state_dict()
    del state["network"]["model.model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    with pytest.raises(AssertionError, match="the state lacks"):
        actor.load_state_dict(state, with_optimizer=True)


@pytest.mark.parametrize(("key", "head"), [("prm", "lm"), ("critic", "value")])
@pytest.mark.parametrize("lora", [None, {}], ids=["whole", "adapters"])
def test_helpers_begin_as_the_policy_with_its_adapters(world, key, head, lora):
    policy, helper, batch = make(world, {}), make(world, lora, key, head, seed=3), make_batch()
    update(policy, batch, 2)
    update(helper, batch, 1)
    helper.start_like(policy)
    expected = {name.removeprefix("model." if head == "value" else ""): w for name, w in weights(policy).items()}
    assert {name: w for name, w in expected.items() if "head" not in name or head == "lm"}.keys() == weights(
        helper
    ).keys()
    same(weights(helper), {name: expected[name] for name in weights(helper)}, 0.0)
    other = make(world, lora, key, head, seed=5)
    other.load_state_dict(copy.deepcopy(helper.state_dict()), with_optimizer=True)
    update(helper, batch)
    update(other, batch)
    same(weights(other), weights(helper), 0.0)


# The reference


def test_the_reference_is_the_policy_as_it_was_and_no_second_model(world):
    policy, separate, batch = make(world, {}), make(world, key="reference", trains=False, seed=8), make_batch()
    alone = held(policy)
    reference = AdapterReference(policy)
    same(logprobs(reference, batch), logprobs(policy, batch), 0.0)
    update(policy, batch, 2)  # as a warm-up would
    reference.start_like(policy)
    separate.start_like(policy)
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
    reference = AdapterReference(policy)
    update(policy, batch)
    before = weights(policy)
    with pytest.raises(KeyError):
        logprobs(reference, batch.exclude("keep"))
    same(weights(policy), before, 0.0)


def test_the_reference_is_saved_with_its_adapters_alone(world):
    (policy, other), batch = (make(world, {}) for _ in range(2)), make_batch()
    reference, loaded = AdapterReference(policy), AdapterReference(other)
    update(policy, batch)
    reference.start_like(policy)
    update(policy, batch)
    state = reference.state_dict()
    assert set(state["network"]) == set(policy.state_dict()["network"])
    before = weights(other)
    loaded.load_state_dict(state, with_optimizer=False)
    same(weights(loaded), weights(reference), 0.0)
    same(weights(other), before, 0.0)
    assert not torch.equal(
        weights(reference)["model.layers.0.mlp.up_proj.weight"], weights(policy)["model.layers.0.mlp.up_proj.weight"]
    )


# 4 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_compute_as_the_matrices_that_they_stand_for(world, dtype):
    """Columns, gradients and updates, and half a byte a weight."""
    strategy, model, batch = make_strategy(world, dtype=dtype), MODEL | {"attention_bias": True}, make_batch()
    plain, packed, dense = (
        make(world, lora, strategy=strategy, model_config=model) for lora in (None, {"quantize": "nf4"}, {})
    )
    for (_, mine), (name, theirs) in zip(dense.adapters.frozen(), packed.weights(), strict=True):
        weight = dict(plain.weights())[name].to(strategy.dtype)
        assert torch.equal(theirs, weight) is ("proj.weight" not in name)
        assert (theirs - weight).abs().max() <= 0.16 * weight.abs().max(), "half of the widest gap of NF4"
        with torch.no_grad():
            mine.to_local().copy_(theirs)
    assert torch.equal(logprobs(packed, batch), logprobs(dense, batch))
    assert update(packed, batch, 3) == update(dense, batch, 3)
    same(weights(packed), weights(dense), 0.0)
    sizes = 2 * (3 * 20 * 24 + 20 * (16 + 8 + 8) + 16 * 20)
    assert held(dense) - held(packed) == sizes * strategy.dtype.itemsize - sizes // 2
    assert logprobs(packed, batch).sum() != logprobs(plain, batch).sum()


def test_bytes_that_fill_no_number(world):
    layer = torch.nn.Linear(3, 5)
    torch.nn.init.uniform_(layer.weight, 0.5, 1.0)
    packed = PackedLinear(layer, torch.float32, torch.device("cpu"))
    inputs = torch.randn(2, 3, requires_grad=True)
    matrix = packed.gathered(packed.weight)
    assert packed.weight.numel() == 2 and matrix.shape == (5, 3) and packed.bias is layer.bias
    assert 0 < (matrix - layer.weight).abs().max() < 0.14, "half of the widest gap of NF4 in the upper half"
    torch.testing.assert_close(packed(inputs), torch.nn.functional.linear(inputs, matrix, layer.bias))


def test_a_model_of_transposed_weights_is_not_packed(world):
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with pytest.raises(ValueError, match=r"^actor.lora.quantize=nf4: GPT2LMHeadModel keeps its weights transposed"):
        make(world, {"quantize": "nf4"}, model_config=gpt2)
    actor, plain = (
        make(world, {"rank": 2}, model_config=gpt2, packing=False),
        make(world, model_config=gpt2, packing=False),
    )
    update(actor, make_batch(), 2)
    plain.start_like(actor)
    same(logprobs(plain, make_batch()), logprobs(actor, make_batch()), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frozen_weights_are_held_in_the_dtype_that_they_are_computed_in(world, tmp_path, dtype):
    """Nothing but their bytes is different; what trains is float32."""
    strategy, batch = make_strategy(world, dtype=dtype), make_batch()
    whole, frozen = make(world, strategy=strategy), make(world, key="reference", trains=False, strategy=strategy)
    actor = make(world, {}, strategy=strategy)
    for other in (frozen, actor):
        assert torch.equal(logprobs(other, batch), logprobs(whole, batch))
        assert {p.dtype for p in other.network.parameters() if not p.requires_grad} == {strategy.dtype}
    assert 2 * held(frozen) == held(whole)
    assert {p.dtype for p in actor.network.parameters() if p.requires_grad} == {torch.float32}
    update(whole, batch, 2)
    frozen.start_like(whole)
    assert torch.equal(logprobs(frozen, batch), logprobs(whole, batch))
    update(actor, batch, 2)
    actor.save_model(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


# Two ranks


@pytest.fixture(scope="module")
def two_ranks(torchrun, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    torchrun(lora_on_ranks.__file__, folder)
    return torch.load(folder / "results.pt", weights_only=False), folder


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_do_what_one_does(world, name, two_ranks, tmp_path):
    one, two = lora_on_ranks.perform(world, tmp_path, **JOBS[name]), two_ranks[0][name]
    exact = "dtype" not in JOBS[name]
    tolerance = 1e-5 if exact else 0.1
    for part in ("gradients", "columns", "weights", "reference weights"):
        close(two[part], one[part], tolerance)
    for part in ("state", "reference state"):  # where a gradient is near 0, Adam makes much of its rounding
        close(two[part]["network"], one[part]["network"], tolerance if exact else 1.0)
    assert two["norms"] == pytest.approx(one["norms"], rel=tolerance)
    assert two["names"] == 2 * one["names"] and two["moments"] == one["moments"]
    file = "adapter_model.safetensors"
    close(load_file(two_ranks[1] / name / file), load_file(tmp_path / file), tolerance if exact else 1.0)
    assert SHARES[2][0] != SHARES[2][1]
    for result in (one, two):
        same(result["columns"]["reference"], result["columns"]["kept"])
        assert not torch.allclose(result["columns"]["policy"], result["columns"]["kept"], atol=1e-3)


# In a run


def test_a_run_without_a_second_model(tiny, monkeypatch):
    """After a warm-up that trained the adapters the reference is base and adapters of that moment."""
    seen, begin = [], Trainer.begin

    def begins(trainer, number, stage, saved):
        before = weights(trainer.policy)
        done = begin(trainer, number, stage, saved)
        seen.append((before, weights(trainer.helpers["reference"]), trainer))
        return done

    monkeypatch.setattr(Trainer, "begin", begins)
    Job(tiny("algorithm/terms=[kl]", "actor/lora=lora", "actor.lora.rank=4")).fit("")
    trainer = seen[1][2]
    assert type(trainer.helpers["reference"]) is AdapterReference
    same(seen[1][1], seen[1][0], 0.0)
    same(weights(trainer.helpers["reference"]), seen[1][0], 0.0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(seen[0][0][name], seen[1][0][name]), "the warm-up did something"
    assert not torch.equal(weights(trainer.policy)[name], seen[1][0][name])


@pytest.fixture
def refused(resolved):
    def run(*overrides, **changes):
        config = resolved(*overrides)
        for key, change in changes.items():
            config[key] |= change
        with pytest.raises(ValueError) as caught:
            Job(config)
        return str(caught.value)

    return run


def test_what_is_refused_before_a_model_is_loaded(refused, resolved, monkeypatch):
    lora = "actor/lora=lora"
    said = refused(lora, reference={"lora": resolved(lora)["actor"]["lora"]})
    assert said == "reference.lora: the reference never trains; set reference.lora=null"
    assert refused(lora, "actor.lora.rank=0") == "actor.lora.rank=0: set it to 1 or more"
    assert refused(lora, "actor.lora.targets=[]").startswith("actor.lora.targets=[] is no layer")
    assert refused(lora, "actor.lora.targets=all").startswith("actor.lora.targets: expected all-linear or ")
    said = refused(lora, "actor.lora.export=adapter")
    assert said.startswith("actor.lora.export=adapter: an adapter is of use beside the model")
    said = refused("actor/lora@critic.lora=lora", "critic.lora.export=adapter")
    assert said.startswith("critic.lora.export=adapter: checkpoints hold the model of the actor alone")
    said = refused("actor/lora@critic.lora=lora", "critic.lora.quantize=nf4")
    assert said.startswith("critic.lora.quantize=nf4: packed weights cannot take over those of the actor")
    said = refused(lora, "reference.micro_batch_tokens=99")
    assert said.startswith("reference.micro_batch_tokens=99: with actor.lora the reference is computed by the actor")
    Job(resolved("reference.micro_batch_tokens=99"))
    Job(resolved(lora, "reference.micro_batch_tokens=99", "reference.path=another/model"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(lora) == 'actor/lora=lora needs peft: pip install "rft[lora]"'
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == "peft" else None)
    said = refused(lora, "actor.lora.quantize=nf4")
    assert said == 'actor.lora.quantize=nf4 needs bitsandbytes: pip install "rft[lora]"'
