"""What vLLM reserves for keys and values on a CPU."""

import pytest
from transformers import Qwen3Config

from rft.rollout.engine.vllm_memory import cache_arguments, cache_bytes
from rft.rollout.server.vllm import VLLMApi

# 2 (keys, values) x 4 bytes x 3 layers x 2 heads x 16 = 768 bytes a token
CONFIG = Qwen3Config(
    num_hidden_layers=3, num_key_value_heads=2, num_attention_heads=4, head_dim=16, max_position_embeddings=300
)


@pytest.mark.parametrize(
    ("arguments", "blocks", "token"),
    [
        ({}, 256 * 3 + 1, 768),  # 300 tokens are 3 blocks of 128
        ({"max_model_len": 128}, 256 + 1, 768),
        ({"max_num_seqs": 4, "dtype": "bfloat16"}, 4 * 3 + 1, 384),
    ],
)
def test_the_bytes_of_all_sequences(arguments, blocks, token):
    assert cache_bytes(CONFIG, arguments) == blocks * 128 * token
    assert cache_arguments(CONFIG, arguments) == {"kv_cache_memory_bytes": blocks * 128 * token}


@pytest.mark.parametrize(
    "arguments", [{"gpu_memory_utilization": 0.1}, {"kv_cache_memory_bytes": 1}, {"max_num_seqs": 2**20}]
)
def test_limits_of_the_user_and_large_needs_are_left_to_vllm(arguments):
    assert cache_arguments(CONFIG, arguments) == {}


def test_the_variable_of_the_user_counts(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert cache_arguments(CONFIG, {}) == {}


def test_a_server_on_a_cpu_reserves_what_its_model_fills(tmp_path, monkeypatch):
    CONFIG.save_pretrained(tmp_path)
    for gpu, limited in ((False, True), (True, False)):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        command, _ = VLLMApi({}).command("python", tmp_path, 8000)
        assert ("--kv-cache-memory-bytes" in command) == limited
