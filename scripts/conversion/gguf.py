"""Writes a model folder as one GGUF file, the format of llama.cpp, a tensor at a time.

Names, types and the order of rows are those of llama.cpp's `convert_hf_to_gguf.py` and `llama-quantize`. A family is in
`FAMILIES` only if transformers and llama.cpp read its files as the same model.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
    quantize,
)
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from conversion.gguf_tokenizer import add_tokenizer
from conversion.model_folder import new_file
from rft.actor.init import meta_model
from rft.actor.loading.gguf_facts import ROPE_FREQS, rope_factors
from rft.actor.loading.stored import StoredWeights, check_stored, find_files, needed_names, open_tensors
from rft.errors import listed

FAMILIES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
}
ASSUMED = {  # llama.cpp computes these families with these values, where a config has the key
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
Q8_0 = GGMLQuantizationType.Q8_0
FEW_BITS = {GGMLQuantizationType[name] for name in ("Q5_1", "Q5_0", "Q4_1", "Q4_0")}
LARGEST = float(np.finfo(np.float16).max)  # of numbers in float16, in which blocks have their scales, too
ROUTER = "ffn_gate_inp.weight"
Read = Callable[[], Tensor]


@dataclass(frozen=True)
class Entry:
    """A tensor of the file.

    Attributes:
        name: in the file.
        shape: in the order of torch.
        kind: in which its numbers are written.
        read: gives its numbers.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    read: Read

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        numbers, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // numbers * size

    def data(self) -> np.ndarray[Any, Any]:
        """Its numbers in its type.

        Raises:
            ValueError: some are not finite, or too large for the type.
        """
        tensor = self.read().float()
        bound = torch.finfo(torch.float32).max if self.kind in (F32, BF16) else LARGEST
        if not (largest := float(tensor.abs().max())) <= bound:
            raise ValueError(
                f"{self.name} has a number of {largest}, and numbers up to {bound:g} are written in "
                f"{self.kind.name.lower()}; choose --type bf16 if it is finite, or an earlier checkpoint"
            )
        return quantize(tensor.contiguous().numpy(), self.kind)


def write_gguf(folder: Path, out: Path, type_name: str) -> list[str]:
    """Writes a causal language model and its tokenizer.

    CPU memory: the largest tensor in float32, and as it is written.

    Args:
        folder: with the config, the weights and the tokenizer.
        out: the file to make.
        type_name: of the matrices, such as q8_0. Norms, biases and routers are written in f32. Rows that are no
            multiple of a block are written in f16. With 4 or 5 bits the output matrix, or the embedding that is tied
            to it, is written in q8_0.

    Returns:
        What the file has otherwise than the folder, a sentence each.

    Raises:
        ValueError: `out` exists, or llama.cpp would not compute what the folder's model does.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json; name a model folder: the actor/ of a checkpoint, or what from-checkpoint "
            "makes of one and merge of an adapter"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _check_config(config, folder)
    with new_file(out) as file, _stored(config, folder) as weights:
        entries, notes = _entries(config, weights, GGMLQuantizationType[type_name.upper()])
        writer = GGUFWriter(file, MODEL_ARCH_NAMES[FAMILIES[config.model_type]])
        _add_sizes(writer, config)
        writer.add_type("model")
        writer.add_name(out.stem)
        writer.add_file_type(LlamaFileType[f"{'ALL' if type_name == 'f32' else 'MOSTLY'}_{type_name.upper()}"])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        notes += add_tokenizer(writer, folder, config.vocab_size)
        for entry in entries:
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, entry.kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in entries:
                writer.write_tensor_data(entry.data())
        finally:
            writer.close()
    return notes


def _check_config(config: PretrainedConfig, folder: Path) -> None:
    """Raises a ValueError for a model that llama.cpp does not compute, or computes otherwise."""
    where = f"{folder}: config.json has"
    if config.model_type not in FAMILIES:
        raise ValueError(f"{where} model_type={config.model_type}; GGUF files are written for {', '.join(FAMILIES)}")
    if wrong := [name for name in config.architectures or () if not name.endswith("ForCausalLM")]:
        raise ValueError(f"{where} the architecture {wrong[0]}; only causal language models become GGUF files")
    options = config.to_dict()
    for key, value in ASSUMED.items():
        if options.get(key, value) != value:
            raise ValueError(f"{where} {key}={options[key]}, and llama.cpp computes with {value}; choose another model")
    window, context = options.get("sliding_window"), config.max_position_embeddings
    if window is not None and window < context:
        raise ValueError(
            f"{where} sliding_window={window}, which GGUF files of this family do not hold; set "
            f"max_position_embeddings={window} there if no text is longer, or choose another model"
        )
    rope = config.rope_parameters
    scaled = rope["rope_type"] != "default"
    if scaled and not (rope["rope_type"] == "llama3" and FAMILIES[config.model_type] == MODEL_ARCH.LLAMA):
        raise ValueError(
            f"{where} rope_type={rope['rope_type']}; a GGUF file is written for rope_type=default, and of a llama for "
            "llama3: choose another model"
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{where} partial_rotary_factor={rope['partial_rotary_factor']}; choose a model without it")


@contextmanager
def _stored(config: PretrainedConfig, folder: Path) -> Iterator[StoredWeights]:
    """The weights of a folder.

    Raises:
        ValueError: there are none, some are missing or have another shape, or they are quantized.
    """
    files = find_files(str(folder), config)
    if not files:
        raise ValueError(f"{folder} has no weights (*.safetensors), or quantized ones; copy those of the whole model")
    model = meta_model(config)
    with open_tensors(files) as tensors:
        weights = StoredWeights(model, tensors)
        check_stored(model, weights, str(folder))
        if lacking := needed_names(model, weights.missing(), headed=True):
            raise ValueError(f"{folder}: the weights lack {listed(lacking)}; copy the whole model there")
        if weights.ties_differ():
            config.tie_word_embeddings = False  # as transformers does
        yield weights


def _entries(
    config: PretrainedConfig, weights: StoredWeights, kind: GGMLQuantizationType
) -> tuple[list[Entry], list[str]]:
    """The tensors of the file in its order, and what is to be said of their types."""
    names = get_tensor_name_map(FAMILIES[config.model_type], config.num_hidden_layers)
    output = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    entries: dict[str, Entry] = {}
    unfit = []
    for name, (shape, read) in _tensors(config, weights).items():
        place = names.get_name(name, (".weight", ".bias"))
        assert place is not None, f"gguf has no name for {name} of a {config.model_type}"
        if place == "output.weight":
            place = output  # tied weights are stored under either name, or both
        written = Q8_0 if place == output and kind in FEW_BITS else kind
        if len(shape) == 1 or place.endswith(ROUTER):
            written = F32
        elif shape[-1] % GGML_QUANT_SIZES[written][0]:
            written = F16
            unfit.append(place)
        entries[place] = Entry(place, shape, written, read)
    block = GGML_QUANT_SIZES[kind][0]
    notes = [f"rows of {listed(unfit)} are no multiple of {block} and are written in f16"] if unfit else []
    return list(entries.values()), notes


def _tensors(config: PretrainedConfig, weights: StoredWeights) -> dict[str, tuple[tuple[int, ...], Read]]:
    """Shapes and readers of tensors in the layout of llama.cpp, by the names that gguf's table knows."""
    tensors: dict[str, tuple[tuple[int, ...], Read]] = {}
    permuted = FAMILIES[config.model_type] == MODEL_ARCH.LLAMA
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, sizes in weights.shapes.items():
        shape, layer = tuple(sizes), name.split(".")[-2]
        read = partial(_read, weights, name)
        if name.endswith(".experts.gate_up_proj"):
            half = (shape[0], shape[1] // 2, shape[2])
            for number, kind in enumerate(("gate_proj", "up_proj")):
                tensors[name.replace("gate_up_proj", f"{kind}.weight")] = half, partial(_half, read, number)
        elif name.endswith(".experts.down_proj"):
            tensors[f"{name}.weight"] = shape, read
        elif permuted and layer in heads:
            tensors[name] = shape, partial(_permute, read, heads[layer])
        else:
            tensors[name] = shape, read
    if config.rope_parameters["rope_type"] == "llama3":
        factors = rope_factors(config)
        tensors[ROPE_FREQS] = tuple(factors.shape), lambda: factors
    return tensors


def _read(weights: StoredWeights, name: str) -> Tensor:
    tensor: Tensor = weights[name][...]
    return tensor


def _half(read: Read, number: int) -> Tensor:
    """The gates of all experts, or what they gate."""
    return read().chunk(2, dim=1)[number]


def _permute(read: Read, heads: int) -> Tensor:
    """Rows in the order of llama.cpp's rotary embedding of llamas: the pairs that it turns are neighbours.

    transformers turns row i with row i + head_dim / 2 of a head.
    """
    tensor = read()
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add_sizes(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Writes the sizes of the model, which llama.cpp has in place of a config."""
    options = config.to_dict()
    head_dim = options.get("head_dim") or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "moe_intermediate_size" in options:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
