"""A layer of linear attention over packed rows computes each row alone, also behind a prefix that rows share."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rft.actor.packing.layout import PackedLayout, PackedSegment
from rft.actor.packing.recurrent import separate_rows
from tests.helpers import SIZES

NEXT = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1}
NEXT |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
NEXT |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}


@torch.no_grad()
def test_rows_of_each_length_and_behind_a_prefix():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **SIZES | NEXT)).eval()
    states = torch.randn(1, 17, 16)
    layer = model.model.layers[0].linear_attn
    first, second, prefix, third, fourth = states[0].split([4, 4, 3, 3, 3])
    rows = (first, second, prefix, torch.cat((prefix, third)), torch.cat((prefix, fourth)))
    alone = [layer(row[None])[0] for row in rows]
    expected = torch.cat([*alone[:3], alone[3][3:], alone[4][3:]])
    assert separate_rows(model.model) == [layer]
    segments = (PackedSegment(2, 4), PackedSegment(1, 3), PackedSegment(2, 3, 1))
    layout = PackedLayout(torch.arange(17), torch.zeros(5, 6), torch.arange(17), segments)
    torch.testing.assert_close(layer(states, layout=layout)[0], expected, rtol=0, atol=1e-5)
    assert (layer(states)[0, 4:] - expected[4:]).abs().max() > 1e-3, "without a layout the rows mix"
