"""Attention of decode steps: which models use it, and that it computes what transformers does."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rft.rollout.engine.base import Request
from rft.rollout.engine.decoding import step_attention as module
from rft.rollout.engine.decoding.step_attention import step_attention, step_obstacle
from tests.helpers import hf_engine
from tests.rollout.word_models import MORE, build, prompts_of, sampling


@pytest.mark.parametrize(("name", "by_step"), [("qwen3", True), ("doge", False), ("eager", False), ("sliding", False)])
def test_padded_rows_attend_without_copies_of_keys(monkeypatch, tokenizer, name, by_step):
    """Two heads of keys serve four of queries. Rows without padding leave that to transformers."""
    heads = []

    def recorded(query, key, *arguments, **options):
        heads.append((query.shape[1:3], key.shape[1]))
        return attend(query, key, *arguments, **options)

    attend = module.scaled_dot_product_attention
    monkeypatch.setattr(module, "scaled_dot_product_attention", recorded)
    engine = hf_engine(build(name), tokenizer, 64)
    engine.fuses = False
    engine.generate([Request(prompt, [1, 2]) for prompt in prompts_of(5, 5)], sampling())
    assert heads == []
    engine.generate([Request(prompt, [1, 2]) for prompt in prompts_of(3, 8)], sampling())
    assert set(heads) == ({((2, 2), 2)} if by_step else set())


def test_which_models_cannot_attend_by_steps():
    for name in ("qwen3", "llama", *MORE):
        assert step_obstacle(build(name)) is None
    assert step_obstacle(build("sliding")).startswith("a mistral has layers that do not attend to all tokens")
    assert step_obstacle(build("eager")) == "a llama computes its attention by 'eager', not by 'sdpa'"
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2))
    assert step_obstacle(own) == "a bloom has an attention of its own"


def test_attention_asked_for_something_else():
    """Transformers computes it, as in a model that attends by sdpa."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(1, 1)
    layer.num_key_value_groups = 2
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = torch.tensor([[True] * 5, [False, False, True, True, True]])[:, None, None]
    per_head = torch.where(torch.rand(2, 4, 1, 5) < 0.5, -1e9, 0.0)
    for mask, others in ((seen, {"dropout": 0.0}), (seen, {"position_bias": torch.randn(2, 4, 1, 5)}), (per_head, {})):
        found, none = step_attention(layer, query, key, value, mask, scaling=0.3, **others)
        expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3, **others)
        torch.testing.assert_close(found, expected)
        assert none is None
