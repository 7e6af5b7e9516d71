"""Tiny models of the words w0, w1, ... and their tokenizer: w0 pads, w1 is unknown, w2 ends a text."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rft.rollout.engine.sampling import Sampling

VOCABULARY = 40
END = 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "eager": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")),
    "sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7)),
}
MORE = {  # by their type in transformers
    "qwen2": {},
    "mixtral": {"num_local_experts": 4},
    "phi": {"num_key_value_heads": 4},
    "olmo2": {},
    "doge": {},  # has a mask for each head
}


def word_tokenizer(vocabulary):
    """A tokenizer of this many words, with whitespace between two."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}", pad_token="w0")


def one_layer():
    """A model of 16 words, in float32."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, eos_token_id=END, bos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape)


def build(name="qwen3"):
    """One of MODELS or MORE, in float64 where transformers and torch can, so that rounding decides no draw."""
    torch.manual_seed(0)
    if name in MODELS:
        model = MODELS[name]()
    else:
        shape = {key: value for key, value in SIZES.items() if key != "head_dim"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape | MORE[name]))
    return model.to(torch.float32 if name in ("eager", "mixtral") else torch.float64).eval()


def ban_the_end(model):
    """No text of the model ends before its limit."""

    def hook(module, args, logits):
        return logits.index_fill(-1, torch.tensor([END]), -1e9)

    model.lm_head.register_forward_hook(hook)


def prompts_of(*lengths):
    """Prompts of ordinary words."""
    rng = random.Random(7)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def sampling(**changes):
    """Up to 12 tokens at temperature 1, and some options changed."""
    plain = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "stop": [],
        "first_token": None,
    }
    return Sampling(**plain | changes)
