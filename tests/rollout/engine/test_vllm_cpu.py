"""What vLLM reserves for keys and values on a CPU, and how it takes prompts there."""

import pytest
from transformers import Qwen3Config

from rft.rollout.engine.vllm_cpu import cache_arguments, cache_bytes, cpu_arguments, whole_prompts
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
        assert ("--kv-cache-memory-bytes" in command) == limited == ("--no-enable-chunked-prefill" in command)


@pytest.mark.parametrize(
    "arguments", [{}, {"max_num_batched_tokens": 300}, {"max_num_batched_tokens": 99, "max_model_len": 99}]
)
def test_prompts_are_computed_whole(arguments):
    assert whole_prompts(CONFIG, arguments) == {"enable_chunked_prefill": False}
    assert cpu_arguments(CONFIG, arguments) == cache_arguments(CONFIG, arguments) | whole_prompts(CONFIG, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_chunked_prefill": True}, r"enable_chunked_prefill=true: on a CPU vLLM dies .*; take it out"),
        ({"max_num_batched_tokens": 299}, r"max_num_batched_tokens=299: .* 300 tokens; set it to 300 or more"),
        ({"max_num_batched_tokens": 98, "max_model_len": 99}, r"max_num_batched_tokens=98: .* 99 tokens; set it to 99"),
    ],
)
def test_parts_of_prompts_are_refused(arguments, said):
    with pytest.raises(ValueError, match=rf"^rollout\.engine_args\.{said}"):
        cpu_arguments(CONFIG, arguments)
