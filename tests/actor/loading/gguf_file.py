"""Writes a small model as a GGUF file, with names and values as the format has them; no code of this package."""

from pathlib import Path

import gguf
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def new_model(head_dim: int = 128) -> Qwen3ForCausalLM:
    """A model; transformers takes 128, the size of all published ones, for the heads of every file of this family."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": head_dim}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vocabulary = {"vocab_size": len(tokens()), "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=512, rms_norm_eps=1e-6, **sizes, **heads, **vocabulary))


def tokens() -> list[str]:
    """Those of all bytes, as GPT-2 spells them, a merged one and the special ones."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [*(letters[byte] for byte in range(256)), "he", *SPECIAL]


def write_gguf(path: Path, model: Qwen3ForCausalLM, architecture: str = "qwen3") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens())
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(257)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.model.state_dict().items():
        writer.add_tensor(_name(name), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if not name.startswith("layers."):
        return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
    number, inside = name.removeprefix("layers.").split(".", 1)
    part, kind = inside.rsplit(".", 1)
    return f"blk.{number}.{NAMES[part]}.{kind}"
