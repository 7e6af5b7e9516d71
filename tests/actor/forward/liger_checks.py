"""Liger's kernels against transformers' own layers, in Triton's interpreter on a CPU.

Run by test_liger.py in a process of its own: `TRITON_INTERPRET=1` has to be set before Triton is imported.
"""

import sys
from types import FunctionType

import pytest
import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import interpreter

from rft.actor.forward.liger import check_liger, replace_layers
from rft.errors import Problems
from rft.setup.assembly import Job
from tests.actor.lora.adapters import logprobs, make, update, weights
from tests.helpers import LAYOUTS, SIZES, make_batch, make_strategy

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    name: SIZES | {"model_type": name, "pad_token_id": 0}
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4")
}


class Number(float):
    """A compiled kernel gets a scalar as a tensor, and the interpreter passes a plain float on."""

    def to(self, _):
        return self


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """What the interpreter lacks: scalars with `to`, and functions of CUDA's libdevice, which return None."""
    run = interpreter.GridExecutor.__call__

    def call(self, *args, **options):
        given = [Number(value) if type(value) is float else value for value in args]
        named = {name: Number(value) if type(value) is float else value for name, value in options.items()}
        return run(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", call)
        patch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
        patch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
        yield


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr("rft.actor.forward.liger.use_liger", lambda model, key, device: replace_layers(model, key))


def build(options, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**options)
    return AutoModelForCausalLM.from_config(config)


def states_and_gradients(model):
    ids = torch.arange(14).view(2, 7) % 22 + 1
    logits = model(input_ids=ids).logits
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        limit = tolerance * max(1.0, float(tensor.abs().max()))
        assert float((found[name] - tensor).abs().max()) <= limit, name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_the_same_and_other_models_keep_their_layers(name):
    plain, fused = build(FAMILIES[name]), build(FAMILIES[name])
    modeling = sys.modules[type(plain).__module__]
    variables, shared = dict(vars(modeling)), dict(vars(torch.nn)) | dict(vars(torch.nn.functional))
    names = list(fused.state_dict())
    check_liger(fused.config, "actor")
    replace_layers(fused, "actor")
    assert dict(vars(modeling)) == variables
    assert dict(vars(torch.nn)) | dict(vars(torch.nn.functional)) == shared
    assert list(fused.state_dict()) == names
    later = build(FAMILIES[name])
    for other in (plain, later):
        assert not any("forward" in vars(module) for module in other.modules())
    replaced = {type(module).__name__ for module in fused.modules() if "forward" in vars(module)}
    assert any(kind.endswith("RMSNorm") for kind in replaced) and any(kind.endswith("MLP") for kind in replaced)
    assert any(kind.endswith("Attention") for kind in replaced) == (name != "glm4")  # Liger has no RoPE for it
    expected = states_and_gradients(plain)
    close(states_and_gradients(fused), expected)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in states_and_gradients(later).items())


# Its kernel of experts does not run in the interpreter.
def test_layers_of_a_mixture_of_experts_are_replaced():
    fused = build(SIZES | MOE | {"model_type": "qwen3_moe"})
    replace_layers(fused, "actor")
    replaced = {type(module).__name__ for module in fused.modules() if "forward" in vars(module)}
    assert replaced == {"Qwen3MoeRMSNorm", "Qwen3MoeAttention", "Qwen3MoeExperts"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_an_actor_computes_and_trains_as_without(world, on_a_cpu, layout, head):
    key, batch = "critic" if head == "value" else "actor", make_batch(prompt=2)
    plain, fused = (make(world, key=key, head=head, liger=liger, **LAYOUTS[layout]) for liger in (False, True))
    close(weights(fused), weights(plain), 0.0)
    output = "logprobs" if head == "lm" else "values"
    close(*({output: actor.compute(batch, (output,), 0.8)[output]} for actor in (fused, plain)))
    expected, found = update(plain, batch), update(fused, batch)
    assert found.keys() == expected.keys()
    norm = next(name for name in expected if name.endswith("grad_norm"))
    assert found[norm] == pytest.approx(expected[norm], rel=1e-5)
    close(gradients(fused), gradients(plain))
    assert list(fused.network.state_dict()) == list(plain.network.state_dict())


def gradients(actor):
    """The first moments of AdamW after one update: the gradients times a constant."""
    state = actor.train_state.optimizer.state
    names = {parameter: name for name, parameter in actor.network.named_parameters()}
    return {names[p]: values["exp_avg"].to_local().clone() for p, values in state.items()}


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_adapters_and_recomputed_activations(world, on_a_cpu, checkpointing):
    batch = make_batch()
    actors = [
        make(world, {}, liger=liger, strategy=make_strategy(world, activation_checkpointing=checkpointing))
        for liger in (False, True)
    ]
    for actor in actors:
        update(actor, batch)
    plain, fused = actors
    close(gradients(fused), gradients(plain))
    close({"logprobs": logprobs(fused, batch)}, {"logprobs": logprobs(plain, batch)}, 1e-3)  # Adam divides small ones


def test_the_model_of_an_engine_has_transformers_own_layers(world, on_a_cpu):
    actor = make(world, liger=True)
    assert not any("forward" in vars(module) for module in actor.plain_model().modules())
    assert any("forward" in vars(module) for module in actor.network.modules())


def test_unknown_families_and_activations_are_refused():
    with pytest.raises(
        ValueError, match=r"^actor\.liger=true: Liger has no kernels for a model of type gpt2; it knows"
    ):
        check_liger(AutoConfig.for_model("gpt2"), "actor")
    other = AutoConfig.for_model("llama", hidden_act="gelu")
    said = r"hidden_act=gelu, and Liger's kernel computes silu or swish; set critic\.liger=false$"
    with pytest.raises(ValueError, match=said):
        check_liger(other, "critic")
    check_liger(AutoConfig.for_model("gemma2"), "actor")


def test_a_run_names_an_unknown_family_before_a_model_is_loaded(resolved, monkeypatch):
    monkeypatch.setattr("rft.strategy.fsdp2_options.device_kind", lambda device: "cuda")
    model = "{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 64}"
    job = Job(resolved("actor.liger=true", "~actor.model_config", f"+actor.model_config={model}"))
    job.load(1)
    with pytest.raises(Problems, match=r"actor\.liger=true: Liger has no kernels for a model of type gpt2"):
        job.check.end()


def test_rotations_are_replaced_in_the_forward_of_one_model_alone():
    fused = build(FAMILIES["qwen3"])
    replace_layers(fused, "actor")
    attention = fused.model.layers[0].self_attn
    assert isinstance(vars(attention)["forward"].__func__, FunctionType)
    assert vars(attention)["forward"].__func__.__globals__["apply_rotary_pos_emb"].__module__.startswith("liger_kernel")
    assert type(attention).forward.__globals__["apply_rotary_pos_emb"].__module__.startswith("transformers")
