"""Arguments of vLLM on a CPU: the memory of its keys and values, and prompts that are computed whole."""

import math
import os
from typing import Any

from transformers import PretrainedConfig

from rft.actor.packing.micro_batches import head_size

BLOCK = 128  # tokens in a block, on a CPU
SEQUENCES = 256  # default of max_num_seqs, on a CPU
MOST = 4 * 2**30  # a model that needs more gets vLLM's share of the machine
VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CHOSEN = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")  # the user's own limits
PARTS = "enable_chunked_prefill"
ENDS = "on a CPU vLLM dies where a step computes a part of a prompt with a seed"
HALF = ("bfloat16", "float16", "half")


def cpu_arguments(config: PretrainedConfig, engine_args: dict[str, Any]) -> dict[str, int]:
    """What an engine on a CPU needs beside `engine_args`; see `cache_arguments` and `whole_prompts`."""
    return cache_arguments(config, engine_args) | whole_prompts(config, engine_args)


def cache_arguments(config: PretrainedConfig, engine_args: dict[str, Any]) -> dict[str, int]:
    """`kv_cache_memory_bytes` that all sequences of an engine on a CPU can fill together. vLLM itself reserves a share
    of the machine for a model of any size.

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


def whole_prompts(config: PretrainedConfig, engine_args: dict[str, Any]) -> dict[str, bool]:
    """The argument with which an engine on a CPU computes each prompt in one step.

    vLLM draws a token behind a part of a prompt too, and then sets the generator of the request's seed back, which a
    generator of the CPU cannot do: the engine dies.

    Args:
        config: of the model.
        engine_args: of the engine.

    Raises:
        ValueError: they ask for parts, or their steps are shorter than a text may be; names the argument.
    """
    if engine_args.get(PARTS):
        raise ValueError(f"rollout.engine_args.{PARTS}=true: {ENDS}; take it out")
    longest = engine_args.get("max_model_len") or config.get_text_config().max_position_embeddings
    step = engine_args.get("max_num_batched_tokens")
    if step is not None and step < longest:
        raise ValueError(
            f"rollout.engine_args.max_num_batched_tokens={step}: {ENDS}, and a text may have {longest} tokens; set it "
            f"to {longest} or more, or set +rollout.engine_args.max_model_len={step}"
        )
    return {PARTS: False}
