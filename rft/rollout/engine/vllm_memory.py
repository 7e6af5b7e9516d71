"""Memory of vLLM's keys and values on a CPU, where vLLM reserves a share of the machine for a model of any size."""

import math
import os
from typing import Any

from transformers import PretrainedConfig

from rft.actor.packing.cost import head_size

BLOCK = 128  # tokens in a block, on a CPU
SEQUENCES = 256  # default of max_num_seqs, on a CPU
MOST = 4 * 2**30  # a model that needs more gets vLLM's share of the machine
VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CHOSEN = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")  # the user's own limits
HALF = ("bfloat16", "float16", "half")


def cache_arguments(config: PretrainedConfig, engine_args: dict[str, Any]) -> dict[str, int]:
    """`kv_cache_memory_bytes` that all sequences of an engine on a CPU can fill together.

    Args:
        config: of the model.
        engine_args: of the engine.

    Returns:
        Nothing if the user set a limit, or if the sequences need more than 4 GiB.
    """
    if os.environ.get(VARIABLE) or any(engine_args.get(name) is not None for name in CHOSEN):
        return {}
    size = cache_bytes(config, engine_args)
    return {"kv_cache_memory_bytes": size} if size <= MOST else {}


def cache_bytes(config: PretrainedConfig, engine_args: dict[str, Any]) -> int:
    """Bytes of the keys and values of `max_num_seqs` sequences of `max_model_len` tokens, and of one reserved block.

    Layers with a sliding window or a compressed cache need less.
    """
    text = config.get_text_config()
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    width = 2 if engine_args.get("dtype") in HALF else 4
    token = 2 * width * text.num_hidden_layers * heads * head_size(text)
    blocks = math.ceil((engine_args.get("max_model_len") or text.max_position_embeddings) / BLOCK)
    return ((engine_args.get("max_num_seqs") or SEQUENCES) * blocks + 1) * BLOCK * token
