"""Whole models with a kernel against the plain model, row by row."""

import copy

import pytest
import torch

from rft.actor.packing.attention import use_packed_attention
from rft.actor.packing.layout import pack_layout, shared_prefixes
from tests.actor.packing.test_attention import MODELS, ROWS, alone, build, close, prompts_batch, states_and_gradients
from tests.actor.packing.test_attention import together as packed_states

NAMES = [
    "qwen3",
    "llama, one head of keys",
    "mistral",
    "gemma3_text",
    "gemma2, capped products",
    "gpt_oss_moe, sinks",
    "deepseek_v3, values of another width",
]
CASES = pytest.mark.parametrize(("name", "shares"), [(name, shares) for name in NAMES for shares in (False, True)])


def check_model(name, shares, kernel, gradients=True):
    """States and gradients of packed rows by a kernel, to 1e-5 of those of each row by the plain model."""
    plain, batch = build(MODELS[name]), prompts_batch()
    model = copy.deepcopy(plain)
    needs = []
    use_packed_attention(model, "actor", choose=lambda found: needs.append(found) or kernel)
    assert kernel.refuses(needs[0]) is None
    layout = pack_layout(batch, shared_prefixes(batch) if shares else torch.zeros(len(ROWS), dtype=torch.int64))
    if not gradients:
        with torch.no_grad():
            close([packed_states(model, batch, layout)], [alone(plain, batch)], 1e-5)
        return
    dtype = torch.float32 if "moe" in name else torch.float64
    expected = states_and_gradients(plain, alone(plain.to(dtype), batch))
    found = states_and_gradients(model, packed_states(model.to(dtype), batch, layout))
    close([found[0]], [expected[0]], 1e-5)
    close(found[1], expected[1], 1e-5)
