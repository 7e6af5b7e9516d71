"""Compiled blocks over packed rows: no graph break, one graph for all rows, and the states of uncompiled blocks.

Blocks are traced, and the traced code runs without code generation; tests/strategy/test_fsdp2_compile.py has all of it.
"""

import copy
from functools import partial

import pytest
import torch
import torch._inductor.lowering  # reads all of torch.ops.aten, before a test puts references there
from torch._dynamo.utils import counters

from rft.actor.init import blocks
from rft.actor.packing.attention import use_packed_attention
from rft.actor.packing.kernels.flex import FlexKernel
from rft.actor.packing.kernels.rows import VarlenKernel
from rft.actor.packing.kernels.sdpa import SdpaKernel
from rft.actor.packing.layout import pack_layout, shared_prefixes
from rft.strategy.compiled import compile_function
from tests.actor.packing.kernels.references import aten_backward, aten_forward
from tests.actor.packing.test_attention import MODELS, build, close, prompts_batch, states_and_gradients
from tests.actor.packing.test_attention import together as packed_states

ROWS = ([0, 1, 2, 4], [3, 5], [0, 1, 2, 3, 4, 5, 6], [5], [0, 1])  # of prompts_batch, in each forward
KINDS = {  # of layers, each with a graph of its own
    "qwen3": 1,
    "llama, one head of keys": 1,
    "mistral": 1,
    "qwen2, one layer in two with a window": 2,
    "gemma2, capped products": 2,
    "gpt_oss_moe, sinks": 2,
    "deepseek_v3, values of another width": 1,
}
LAYERS = 4


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def models(name, kernel):
    """The same packed model twice, its blocks plain and compiled."""
    config = MODELS[name] | {"num_hidden_layers": LAYERS}
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = LAYERS
    plain = build(config)
    use_packed_attention(plain, "actor", choose=lambda needs: kernel)
    compiled = copy.deepcopy(plain)
    for block in blocks(compiled):
        block.forward = compile_function(block.forward)
    return plain, compiled


def layouts():
    batch = prompts_batch()
    for rows in ROWS:
        part = batch[torch.tensor(rows)]
        for shared in (shared_prefixes(part), torch.zeros(len(rows), dtype=torch.int64)):
            yield part, pack_layout(part, shared)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3")) for name in KINDS])
@pytest.mark.parametrize("kernel", [SdpaKernel, pytest.param(VarlenKernel, marks=pytest.mark.slow)])
def test_any_rows_have_the_same_graphs_and_the_states_of_plain_blocks(name, kernel, traced, monkeypatch):
    if kernel is VarlenKernel and "capped" in name:
        pytest.skip("refused: see test_rows")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    plain, compiled = models(name, kernel())
    for part, layout in layouts():
        found, expected = (
            states_and_gradients(model, packed_states(model, part, layout)) for model in (compiled, plain)
        )
        close([found[0], *found[1]], [expected[0], *expected[1]], 1e-5)
        assert counters["stats"]["unique_graphs"] == KINDS[name], "layers of a kind share a graph, and so do all rows"
    with torch.no_grad():
        for part, layout in layouts():
            close([packed_states(compiled, part, layout)], [packed_states(plain, part, layout)], 1e-5)
    assert counters["stats"]["unique_graphs"] == 2 * KINDS[name], "and another one without gradients"
    assert not counters["graph_break"]


@pytest.mark.slow
def test_flex_attention_breaks_the_graph_and_compiles_no_rows_again(traced):
    plain, compiled = models("qwen3", FlexKernel())
    graphs = []
    with torch.no_grad():
        for part, layout in layouts():
            close([packed_states(compiled, part, layout)], [packed_states(plain, part, layout)], 1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    assert counters["graph_break"]
    assert set(graphs) == {graphs[0]}
