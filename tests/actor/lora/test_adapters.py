"""Adapters: what trains, what they compute, where their weights go, on one rank and several, and what is refused."""

import math
import re
from functools import cache

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rft.actor.model import add_end_tokens, write_export
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import Sampling
from rft.setup.assembly import Job
from tests.actor.lora import lora_on_ranks
from tests.actor.lora.adapters import logprobs, make, same, update, weights
from tests.actor.lora.lora_on_ranks import JOBS, SHARES, SPLIT
from tests.helpers import MODEL, close, hf_engine, make_batch
from tests.train.checkpoint.states import restore, whole_state

WHOLE = re.compile(r"(q|k|v|gate|up)_proj\.lora_A|(o|down)_proj\.lora_B")  # on every rank that splits the layer
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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
    plain.copy_weights_from(actor)
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
    moments = [
        value for state in actor.train_state.optimizer.state.values() for value in state.values() if value.dim() > 0
    ]
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
    monkeypatch.setattr("rft.actor.model.load_with_head", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError) as caught:
        make(world, {"targets": targets})
    assert str(caught.value).startswith(said)


def test_packed_bytes_are_no_numbers_that_could_be_infinite(world):
    actor = make(world, {"quantize": "nf4", "rank": 2})
    layer = next(iter(actor.adapters.packed.values()))
    layer.weight.data.to_local().fill_(math.nan)  # as bytes may be
    assert actor.nonfinite_tensor() is None
    name, adapter = next((name, p) for name, p in actor.network.named_parameters() if p.requires_grad)
    adapter.data.to_local()[0, 0] = math.inf
    assert actor.nonfinite_tensor() == name


# Where the weights go


def test_the_engine_computes_what_the_trainer_computes(world):
    """After every update; the weights beside the adapters are not copied, the merged ones are copies."""
    actor, batch = make(world, {"targets": ["q_proj", "mlp.*"]}), make_batch()
    engine = hf_engine(actor.plain_model(), actor.tokenizer, max_rows=8)
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
        rows["response_mask"] = rows["loss_mask"] = (torch.arange(text.shape[1]) >= len(prompt))[None]
        same(logprobs(actor, rows)[0, len(prompt) :], torch.tensor(found.logprobs), 1e-5)
        seen.append(found.logprobs)
        update(actor, batch)
    assert seen[0] != seen[1] != seen[2]
    own = {tensor.to_local().data_ptr() for tensor in actor.network.state_dict().values()}
    copied = {name for name, tensor in engine.model.state_dict().items() if tensor.data_ptr() not in own}
    assert copied == {f"{name}.weight" for name in actor.adapters.layers}


@pytest.mark.parametrize("lora", [{"alpha": 8, "rslora": True}, {"targets": ["q_proj"]}, {"quantize": "nf4"}])
def test_weights_and_adapters_can_be_had_apart(world, tmp_path, lora):
    """What an exported adapter adds to the weights beside it are the merged weights."""
    actor = make(world, lora)
    update(actor, make_batch(), 2)
    handed = actor.weights()
    actor.adapters.save({name: tensor.clone() for name, tensor in handed.alone()}, tmp_path)
    base = {name: tensor.clone() for name, tensor in handed.base()}
    assert base.keys() == dict(handed).keys() == make(world).network.model.state_dict().keys()
    saved, config = load_file(tmp_path / "adapter_model.safetensors"), actor.adapters.config
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    for name in actor.adapters.layers:
        a, b = (saved[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        base[f"{name}.weight"] += scale * b @ a
    same(base, dict(handed))


def test_it_is_known_when_the_weights_beside_the_adapters_change(world):
    actor, seen = make(world, {}), []
    for change in (
        lambda: None,
        lambda: update(actor, make_batch()),
        lambda: actor.copy_weights_from(make(world, seed=1)),
        lambda: update(actor, make_batch()),
        lambda: actor.load_state_dict(make(world, {}, seed=2).state_dict()),
    ):
        change()
        seen.append(actor.weights().base_version)
    assert seen == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("export", "quantize"), [("merged", None), ("adapter", None), ("merged", "nf4")])
def test_a_saved_model_is_loaded_by_its_library(world, tmp_path, export, quantize, tied, monkeypatch):
    base = make(world, model_config=MODEL | {"tie_word_embeddings": tied}, seed=4)
    base.save_model(tmp_path / "base")
    (tmp_path / "latest").symlink_to("base")
    monkeypatch.chdir(tmp_path)
    actor, batch = make(world, {"export": export, "quantize": quantize}, path="latest"), make_batch()
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
        assert model.peft_config["default"].base_model_name_or_path == str((tmp_path / "base").resolve())
    ids = batch["tokens", "input_ids"]
    theirs = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    ours = actor.compute(batch, ("logprobs",), 1.0)["logprobs"][:, 1:]
    same(ours, theirs.where(batch["loss_mask"][:, 1:], 0.0), 1e-5)
    assert model.dtype == torch.float32
    assert not torch.allclose(ours, base.compute(batch, ("logprobs",), 1.0)["logprobs"][:, 1:], atol=1e-3)


@pytest.mark.parametrize("ends", [(), (7,), (7, 9)])
def test_an_adapter_alone_names_the_end_tokens_of_the_run(ends, world, tmp_path):
    """Its generation config all of them, its tokenizer the one that plain answers are trained to end with."""
    make(world, seed=4).save_model(tmp_path / "base")
    actor = make(world, {"export": "adapter"}, path=str(tmp_path / "base"))
    model, tokenizer = actor.plain_model(), actor.tokenizer
    add_end_tokens(model, ends)
    tensors, dtype = actor.export_weights(), torch.float32
    write_export(tensors, tmp_path / "out", model, actor.adapters, tokenizer, "lm", None, ends, dtype)
    named = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert named == ([tokenizer.eos_token_id, *ends] if ends else tokenizer.eos_token_id)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.eos_token_id == [*ends, tokenizer.eos_token_id][0] and saved.pad_token_id == tokenizer.pad_token_id
    assert saved("3a").input_ids == tokenizer("3a").input_ids and tokenizer.eos_token_id == 1
    again = make(world, {"export": "adapter"}, path=str(tmp_path / "out"))
    same(weights(again), weights(actor), 0.0)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_state_holds_what_trains_and_goes_on_exactly(world, head):
    key, batch = {"lm": "actor", "value": "critic"}[head], make_batch()
    tied = {"model_config": MODEL | {"tie_word_embeddings": True}}
    actor, other = (make(world, {}, key, head, **tied) for _ in range(2))
    update(actor, batch, 2)
    state = whole_state(actor)
    assert set(state["network"]) == {name for name, p in actor.network.named_parameters() if p.requires_grad}
    restore(other, state)
    assert update(actor, batch, 2) == update(other, batch, 2)
    same(weights(other), weights(actor), 0.0)


def test_a_state_without_a_weight_that_trains_is_refused(world):
    actor = make(world, {})
    state = actor.state_dict()
    del state["network"]["model.model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    with pytest.raises(AssertionError, match="the state lacks"):
        actor.load_state_dict(state)


@pytest.mark.parametrize(("key", "head"), [("prm", "lm"), ("critic", "value")])
@pytest.mark.parametrize("lora", [None, {}], ids=["whole", "adapters"])
def test_helpers_begin_as_the_policy_with_its_adapters(world, key, head, lora):
    policy, helper, batch = make(world, {}), make(world, lora, key, head, seed=3), make_batch()
    update(policy, batch, 2)
    update(helper, batch, 1)
    helper.copy_weights_from(policy)
    expected = {name.removeprefix("model." if head == "value" else ""): w for name, w in weights(policy).items()}
    assert {name: w for name, w in expected.items() if "head" not in name or head == "lm"}.keys() == weights(
        helper
    ).keys()
    same(weights(helper), {name: expected[name] for name in weights(helper)}, 0.0)
    other = make(world, lora, key, head, seed=5)
    restore(other, whole_state(helper))
    update(helper, batch)
    update(other, batch)
    same(weights(other), weights(helper), 0.0)


# Two ranks


@pytest.fixture(scope="module")
def on_ranks(torchrun, tmp_path_factory):
    """What jobs came to on a number of ranks, and their folder."""

    @cache
    def run(ranks):
        folder = tmp_path_factory.mktemp("ranks")
        torchrun(lora_on_ranks.__file__, folder, ranks=ranks)
        return torch.load(folder / "results.pt", weights_only=False), folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in JOBS), *((4, name) for name in SPLIT)])
def test_several_processes_do_what_one_does(world, ranks, name, on_ranks, tmp_path):
    results, folder = on_ranks(ranks)
    one, two = lora_on_ranks.perform(world, tmp_path, **JOBS[name]), results[name]
    exact = "dtype" not in JOBS[name]
    tolerance = 1e-5 if exact else 0.1
    for part in ("columns", "weights", "reference weights"):
        close(two[part], one[part], tolerance)
    alone = 2e-4 if name in SPLIT else tolerance  # B is near 0, and so are gradients of A
    close(two["gradients"], one["gradients"], alone)
    for part in ("state", "reference state"):  # where a gradient is near 0, Adam makes much of its rounding
        close(two[part]["network"], one[part]["network"], alone if exact else 1.0)
    assert two["norms"] == pytest.approx(one["norms"], rel=tolerance)
    assert two["names"] == ranks * one["names"]
    twice = [tensor for part, tensor in one["gradients"].items() if "split" in name and WHOLE.search(part)]
    assert two["moments"] == one["moments"] + sum(2 * tensor.nbytes for tensor in twice)
    file = "adapter_model.safetensors"
    close(load_file(folder / name / file), load_file(tmp_path / file), alone if exact else 1.0)
    assert SHARES[2][0] != SHARES[2][1]
    for result in (one, two):
        same(result["columns"]["reference"], result["columns"]["kept"])
        assert not torch.allclose(result["columns"]["policy"], result["columns"]["kept"], atol=1e-3)


# What is refused


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
    assert refused(lora, "actor.lora.rank=0") == "actor.lora.rank=0: it must be at least 1"
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
