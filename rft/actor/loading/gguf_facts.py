"""What a GGUF file says and transformers does not read: how text is split, and scaled rotary embeddings.

The meaning of keys and names is that of llama.cpp.
"""

import json
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT2_BYTES: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "use_regex": True,
}  # split by the expression of GPT-2
BYTES = GPT2_BYTES | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLIT: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
# By llama.cpp's name: the pre-tokenizer, and whether a piece that is a token is not merged at all.
SPLITS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([GPT2_BYTES], False),
    "smollm": ([DIGITS, GPT2_BYTES], False),
    "qwen2": ([SPLIT | {"pattern": {"Regex": QWEN2}}, BYTES], False),
    "smaug-bpe": ([SPLIT | {"pattern": {"Regex": LLAMA3}}, BYTES], False),
    "llama-bpe": ([SPLIT | {"pattern": {"Regex": LLAMA3}}, BYTES], True),
}
OFFSETS = "trim_offsets"  # of a pre-tokenizer; changes no token
ROPE_FREQS = "rope_freqs.weight"  # by what frequencies are divided
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def set_split(tokenizer: PreTrainedTokenizerBase, reader: Any) -> str:
    """Lets a tokenizer split text as the file says.

    Args:
        tokenizer: that transformers reads from the file.
        reader: `gguf.GGUFReader` of the file.

    Returns:
        What is not as the file says, for the user; or an empty text.
    """
    kind, name = (_field(reader, f"tokenizer.ggml.{part}") for part in ("model", "pre"))
    if kind != "gpt2":
        return ""
    if name not in SPLITS:
        return f"the file splits text by {name!r}, and the tokenizer by what transformers has for the model"
    steps, whole = SPLITS[name]
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    stated["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{OFFSETS: False, **step} for step in steps]}
    made = type(tokenizer.backend_tokenizer).from_str(json.dumps(stated))
    tokenizer.backend_tokenizer.pre_tokenizer = made.pre_tokenizer
    tokenizer.backend_tokenizer.model.ignore_merges = whole
    return ""


def set_rotation(config: PretrainedConfig, reader: Any) -> None:
    """Gives a model the scaled rotary embedding of the file, if it has one.

    Args:
        config: that transformers reads from the file.
        reader: see `set_split`.

    Raises:
        ValueError: the rotary embedding is scaled in another way than that of Llama 3.
    """
    scales = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS), None)
    if scales is None:
        return
    factors = torch.tensor(scales, dtype=torch.float32).flatten()
    rope = config.rope_parameters
    config.rope_parameters = {**rope, **LLAMA3_ROPE, "rope_type": "llama3", "factor": float(factors.max())}
    if not torch.allclose(rope_factors(config), factors, rtol=1e-4, atol=0):
        raise ValueError("its rotary embedding is scaled in another way than that of Llama 3")


def rope_factors(config: PretrainedConfig) -> Tensor:
    """By what llama.cpp divides the frequencies of rope_type=llama3.  # (head_dim / 2,)"""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dims = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    factors: Tensor = config.rope_parameters["rope_theta"] ** -dims / scaled
    return factors


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
