"""New weights in the engine: they replace the tensors of the model, which must all be there."""

import copy
from dataclasses import replace

import pytest
import torch

from rft.rollout.engine.base import Request
from rft.rollout.engine.hf import HFEngine, float32_logits
from rft.strategy.gather import GatherOptions
from tests.actor.forward.tensor_cores import TensorCores
from tests.helpers import engine_context, hf_engine
from tests.rollout.word_models import MODELS, VOCABULARY, build, prompts_of, sampling, word_tokenizer


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_new_weights_change_the_text(tokenizer, name):
    engine = hf_engine(build(name), tokenizer, 64)
    requests = [Request(prompts_of(5)[0], [1, 2])]
    before = engine.generate(requests, sampling())
    assert {v for c in before[0] for v in c.versions} == {0}
    torch.manual_seed(9)
    actor = MODELS[name]().double()
    engine.update_weights(3, ((key, value) for key, value in actor.state_dict().items()))
    after = engine.generate(requests, sampling())
    assert {v for c in after[0] for v in c.versions} == {3}
    assert after[0][0].tokens != before[0][0].tokens
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    assert all(parameter.requires_grad for parameter in actor.parameters())
    again = hf_engine(actor, tokenizer, 64).generate(requests, sampling())
    assert [c.tokens for c in again[0]] == [c.tokens for c in after[0]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_are_shared_but_while_a_cpu_samples(device):
    actor = build().float()
    tokenizer = word_tokenizer(VOCABULARY)
    context = replace(engine_context(copy.deepcopy(actor), tokenizer), device_type=device)
    engine = HFEngine(HFEngine.Options(max_rows=64, dtype=None, cuda_graphs=False), context)
    weights, looks = actor.state_dict(), []

    def look(*_):
        copied = {weight.data_ptr() != weights[name].data_ptr() for name, weight in own if "norm" not in name}
        looks.append((copied, all(torch.equal(weight, weights[name]) for name, weight in own)))

    engine.model.lm_head.register_forward_pre_hook(look)
    for version in range(2):
        engine.update_weights(version, weights.items())
        own = engine.model.state_dict(keep_vars=True).items()
        for _ in range(2):
            assert all(weight.data_ptr() == weights[name].data_ptr() for name, weight in own)
            engine.generate([Request([5, 6], [1])], sampling())
    assert looks and all(look == ({device == "cpu"}, True) for look in looks)


def test_one_name_of_tied_weights_is_enough(tokenizer):
    engine = hf_engine(build(), tokenizer, 64)
    tensors = {key: value.clone() for key, value in build().state_dict().items() if key != "lm_head.weight"}
    engine.update_weights(1, tensors.items())
    assert engine.model.lm_head.weight.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()


def test_weights_of_another_type_are_converted(tokenizer):
    engine = hf_engine(build().float(), tokenizer, 64)
    engine.update_weights(1, build().state_dict().items())
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}


def test_weights_must_be_all_there_and_known(tokenizer):
    engine = hf_engine(build(), tokenizer, 64)
    tensors = build().state_dict()
    with pytest.raises(AssertionError, match=r"no weight 'head\.weight'"):
        engine.update_weights(1, [*tensors.items(), ("head.weight", torch.zeros(1))])
    tensors.pop("model.norm.weight")
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        engine.update_weights(1, tensors.items())


def bare(dtype, own=None):
    """An engine without weights, whose trainer computes in a dtype, and weights for it in float32."""
    model = build().float()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    options = HFEngine.Options(max_rows=64, dtype=own, cuda_graphs=False)
    return HFEngine(options, engine_context(model, word_tokenizer(VOCABULARY), computes=dtype)), weights


def held(engine):
    """Bytes of the storages of the parameters."""
    return sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters())


def test_the_engine_holds_the_trainers_dtype_unless_it_has_its_own():
    for trainer, own, dtype in (
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "float16", torch.float16),
    ):
        engine, weights = bare(trainer, own)
        assert engine.gather_options == GatherOptions(dtype)
        engine.update_weights(1, weights.items())
        assert {parameter.dtype for parameter in engine.model.parameters()} == {dtype}
        shared = engine.model.model.norm.weight.data_ptr() == weights["model.norm.weight"].data_ptr()
        assert shared == (dtype == torch.float32), "what is not rounded is not copied"
        assert engine.options.compute_dtype({}, str(trainer).removeprefix("torch.")) == str(dtype)[6:]


def test_asleep_it_holds_nothing_and_wakes_with_the_same_answers():
    for dtype in (torch.float32, torch.bfloat16):
        engine, weights = bare(dtype)
        names = len(list(engine.model.parameters()))
        assert held(engine) == names * dtype.itemsize, "it comes without weights"
        requests = [Request(prompts_of(5)[0], [1, 2])]
        engine.update_weights(1, weights.items())
        first = engine.generate(requests, sampling())
        assert held(engine) > 100 * names * dtype.itemsize
        engine.sleep()
        assert held(engine) == names * dtype.itemsize
        engine.update_weights(1, weights.items())
        assert engine.generate(requests, sampling()) == first


def test_it_samples_with_weights_by_columns_and_then_has_those_that_it_got():
    for dtype in (torch.float32, torch.bfloat16):
        engine, weights = bare(dtype)
        engine.update_weights(1, weights.items())
        head, strides = engine.model.lm_head, []
        head.register_forward_pre_hook(lambda head, states, into=strides: into.append(head.weight.stride(0)))
        before = [parameter.data_ptr() for parameter in engine.model.parameters()]
        engine.generate([Request(prompts_of(5)[0], [1])], sampling())
        by_columns = {stride == 1 for stride in strides}
        assert by_columns == {dtype == torch.float32}, "a CPU reorders weights of fewer bits itself"
        assert [parameter.data_ptr() for parameter in engine.model.parameters()] == before


@pytest.mark.parametrize("on_gpu", [False, True])
def test_logits_of_a_narrow_head_are_float32(monkeypatch, on_gpu):
    """Logits near 300 in bfloat16 would be multiples of 2. A GPU multiplies the head as it is."""
    monkeypatch.setattr("rft.rollout.engine.hf.on_tensor_cores", lambda *_: on_gpu)
    head = torch.nn.Linear(2, 3, dtype=torch.bfloat16).requires_grad_(False)
    head.weight.data = torch.tensor([[256.0, 1.0], [256.0, 1.5], [0.0, 1.0]], dtype=torch.bfloat16)
    head.bias.data = torch.tensor([0.5, 0.0, 0.0], dtype=torch.bfloat16)
    states = torch.tensor([[[1.0, 1.0]], [[0.0, 2.0]]], dtype=torch.bfloat16)
    with TensorCores() as products:
        found = float32_logits(head, states)
    assert found.dtype == torch.float32
    assert products.sixteen == [(torch.bfloat16, torch.bfloat16, torch.float32)] * on_gpu
    assert found.tolist() == [[[257.5, 257.5, 1.0]], [[2.5, 3.0, 2.0]]]
    engine, weights = bare(torch.bfloat16)
    engine.update_weights(1, weights.items())
    with TensorCores():
        assert engine.model(torch.tensor([[1, 2]])).logits.dtype == torch.float32
