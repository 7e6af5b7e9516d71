"""Small model folders of the families that become GGUF files, and what such a file holds."""

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
MODELS = {  # sizes of heads and experts that the reader of transformers does not take from a file are its defaults
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 16, "rms_norm_eps": 1e-5},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True
    },
}  # fmt: skip
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "Ġ"), ("ð", "Ł")]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}"
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def byte_level(splitter=GPT2, ignore_merges=False, normalizer=None, more=0, **options):
    """A small byte-level BPE of three special tokens, one that is not special, and `more` of these."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocabulary = {piece: number + 3 for number, piece in enumerate(pieces)}
    tokens = {"<eos>": 0, "<|turn|>": 1, "<pad>": 2}
    tokenizer = Tokenizer(models.BPE(vocabulary | tokens, MERGES, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False, **options
    )
    made.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    made.add_tokens(["<note>", *(f"<{number}>" for number in range(more))])
    made.chat_template = TEMPLATE
    return made


def save(folder, family="llama", tokenizer=None, dtype=torch.float32, **changes):
    """A model of random numbers, none of them 0 or 1, and a tokenizer in a folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | MODELS[family] | changes))
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.5 if weight.ndim == 1 else 0.0, std=0.3)
    model = model.to(dtype)
    model.save_pretrained(folder)
    (byte_level() if tokenizer is None else tokenizer).save_pretrained(folder)
    return model.eval()


def read(file):
    """The tensors of a file, with their types, and its fields."""
    reader = GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return tensors, {name: field.contents() for name, field in reader.fields.items()}
