"""Frozen weights in fewer bytes: what they compute, and how many bytes they are."""

import pytest
import torch
from safetensors.torch import load_file

from rft.actor.lora.nf4 import PackedLinear
from tests.actor.lora.adapters import held, logprobs, make, same, update, weights
from tests.helpers import MODEL, make_batch, make_strategy


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


@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles its function for sizes like these: 17 seconds
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
    plain.copy_weights_from(actor)
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
    frozen.copy_weights_from(whole)
    assert torch.equal(logprobs(frozen, batch), logprobs(whole, batch))
    update(actor, batch, 2)
    actor.save_model(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
