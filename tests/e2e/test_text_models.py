"""Whole runs of text models with logits or layers of their own: sampled, trained, exported and read again."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rft.actor.heads import LanguageNetwork
from rft.actor.init import attention, load_model
from rft.setup.assembly import Job
from tests.helpers import token_batch

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 6, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 6},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 6}
    | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "qwen3_next": EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    | {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}  # fmt: skip
UNPACKED = ("llama4_text",)
PLAIN = ("gemma2", "qwen3_next")


@pytest.mark.parametrize("name", [name if name in PLAIN else pytest.param(name, marks=pytest.mark.slow)
                                  for name in MODELS])  # fmt: skip
def test_a_run(name, tiny, tmp_path):
    """The entropy gives a gradient also where no text of a new model is right."""
    config = tiny("algorithm/terms=[entropy]", "warmup=none", "steps=2")
    own = {"model_type": name, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config["actor"]["model_config"] |= own | MODELS[name]
    if name == "cohere":
        del config["actor"]["model_config"]["head_dim"]
    config["actor"]["packing"] = name not in UNPACKED
    Job(config).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "grad_norm" in row]
    assert len(trained) == 2 and all(row["grad_norm"] > 0 and row["rollout/logprob_gap"] < 1e-4 for row in trained)
    exported = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    saved, tokenizer = AutoConfig.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, **attention(saved))
    assert len(tokenizer) == model.config.vocab_size
    batch = token_batch(torch.tensor([3, 4, 5, 6, 7, 8, 9, 3, 4, 6, 5, 4]), torch.tensor([5, 4, 3]))
    again = load_model(str(exported), saved, 0)
    found = LanguageNetwork(again)(batch["tokens"], batch["response_mask"], ("logprobs",), 1.0)["logprobs"]
    for row, length in enumerate((12, 3)):
        ids = batch["tokens", "input_ids"][row, :length]
        expected = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(found[row, 1:length], expected, rtol=0, atol=1e-5)
