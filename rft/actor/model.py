"""Makes the network of an actor under a strategy: loads the model, gives it a head, freezes, adapts and shards it."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.base import ModelContext
from rft.actor.forward.logits import forbidden_tokens, vocabulary_size
from rft.actor.heads import LanguageNetwork, Network, ValueNetwork
from rft.actor.init import LOAD_WEIGHTS, SCORING, blocks, load_with_head, meta_model, read_config, read_weights
from rft.actor.loading.deferred_init import Drawing
from rft.actor.loading.export import write_model
from rft.actor.loading.stand_ins import zeros
from rft.actor.loading.stored import DTYPES, find_files, open_tensors
from rft.actor.lora.base import Adapters, Lora, find_adapter, model_path
from rft.actor.options import LIGER, ActorOptions
from rft.actor.packing.attention import use_packed_attention, use_padded_attention
from rft.actor.packing.kernels.choose import choose_kernel
from rft.imports import import_part
from rft.strategy.base import Strategy


@dataclass
class ShardedModel:
    """A model that its strategy has spread over the ranks.

    Attributes:
        network: computes columns.
        blocks: the parts of the network that are sharded one by one.
        plain: the unsharded model, its parameters zeros that take no memory.
        adapters: that train in place of the model's own weights, or None.
        loaded_dtype: of the files that what is exported was read from; float32 for what is new.
    """

    network: Network
    blocks: list[nn.Module]
    plain: PreTrainedModel
    adapters: Adapters | None
    loaded_dtype: torch.dtype


def build_model(context: ModelContext, options: ActorOptions) -> ShardedModel:
    """Loads a model and spreads it over the ranks.

    Where the strategy shards models on the meta device, a rank reads its own shards of the path alone, or draws one
    tensor of a new model at a time. With `lora` and the path of an adapter, this adapter trains on.

    Args:
        context, options: of the model.

    Raises:
        ValueError: the model cannot be loaded or spread; names the key.
    """
    key, strategy, tokenizer = context.key, context.strategy, context.tokenizer
    path, head, lora, trains = options.path, options.head, options.lora, options.optimizer is not None
    device, size, media = context.world.device, vocabulary_size(tokenizer), context.media is not None
    config = read_config(path, options.model_config, size, key, options.trust_remote_code, media)

    def meta() -> PreTrainedModel:
        made = meta_model(config)
        made.requires_grad_(trains)
        options.freeze(made)
        return made

    strategy.check_model(config, meta, options.packing, key)
    continued = None
    if lora is not None:
        continued = None if path is None else find_adapter(path)
        lora.part("find", key)(lora, config, continued, key)
        path = path if continued is None else continued.base
    dtype = loaded_dtype(path, config, lora, continued)

    drawing = Drawing() if strategy.shards_meta else None
    model = load_with_head(path, config, context.seed, tokenizer.pad_token_id, head, key, drawing)
    model_blocks = blocks(model)
    compiled = strategy.compile and device.type == "cuda"
    if head == "lm":
        forbidden = forbidden_tokens(len(model.get_output_embeddings().weight), tokenizer, context.media)
        network: Network = LanguageNetwork(model, f"{key}.path", compiled, strategy.device_type, forbidden)
    elif head in SCORING:
        network = import_part("rft.actor.scorers", "score_network", f"{key}.head={head}")(model, head, f"{key}.path")
    else:
        network = ValueNetwork(model.base_model)
    plain = empty_like(network.model, device)
    add_end_tokens(plain, context.ends)
    if options.packing:
        use_packed_attention(model, key, context.media, lambda needs: choose_kernel(strategy, needs, key))
    else:
        use_padded_attention(model, context.media)
    network.requires_grad_(trains)
    options.freeze(model)
    adapters: Adapters | None = None
    if lora is not None:
        add = lora.part("add", key)
        adapters = add(lora, network.model, path, key, context.seed, strategy.dtype, device)
        if adapters is not None and continued is not None:
            adapters.start_from(continued)
    if not trains or lora is not None:
        for parameter in network.parameters():
            if not parameter.requires_grad:  # no update needs more precision than the forward
                parameter.data = parameter.data.to(strategy.dtype)
    if options.liger:
        import_part(LIGER, "use_liger", f"{key}.liger=true")(network.model, key, device)
    network.eval()  # no dropout: old and current log-probabilities are of one function
    strategy.parallelize(network.model.base_model, key)
    strategy.shard(network, model_blocks)
    read_shards(strategy, network, network.model, plain, path, drawing)
    return ShardedModel(network, model_blocks, plain, adapters, dtype)


def read_shards(
    strategy: Strategy,
    network: nn.Module,
    model: nn.Module,
    plain: PreTrainedModel,
    path: str | None,
    drawing: Drawing | None,
) -> None:
    """Reads or draws this rank's shards of a network that its strategy has left on the meta device.

    Args:
        network: sharded.
        model: the part of the network that the path holds.
        plain, path, drawing: see `read_weights`.
    """
    if drawing is not None and any(parameter.is_meta for parameter in network.parameters()):
        strategy.materialize(network)
        read_weights(model, plain, path, drawing)


def empty_like(model: nn.Module, device: torch.device) -> PreTrainedModel:
    """A copy of a model's structure and buffers, without memory for weights.

    Each parameter is one zero, expanded to its shape, until weights are put in its place; tied weights stay tied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(zeros(parameter, device=device), requires_grad=False)
    return copy.deepcopy(model, memo).to(device)


def write_export(
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    model: PreTrainedModel,
    adapters: Adapters | None,
    tokenizer: PreTrainedTokenizerBase,
    head: str,
    save_processor: Callable[[Path], None] | None,
    ends: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Writes a policy, its tokenizer and processor: a folder that transformers loads, or an adapter that peft loads.

    Args:
        weights: names and whole tensors: of the adapters where they are exported alone, else those of `exported`.
        model: the structure and the configs, which are changed; its weights are not read.
        head: of the actor.
        save_processor: see `MediaFacts.save`; None for a model of text.
        ends: see `ModelContext.ends`.
        dtype: of the weights.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    alone = adapters is not None and adapters.exported_alone
    end = next(iter(ends), tokenizer.eos_token_id)
    saved = with_end_token(tokenizer, end) if head == "score" else ending_in(tokenizer, end) if alone else tokenizer
    if save_processor is not None:  # with its tokenizer, which that of the export replaces
        save_processor(folder)
    saved.save_pretrained(folder)
    set_end_tokens(model, tokenizer)
    if adapters is not None and adapters.exported_alone:
        adapters.save({name: tensor.to("cpu", dtype) for name, tensor in weights}, folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        return
    write_model(model, weights, folder, dtype)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a text: those of the model's generation config and the tokenizer's own, sorted."""
    return sorted({*_named_ends(model), tokenizer.eos_token_id} - {None})


def add_end_tokens(model: PreTrainedModel, ends: Iterable[int]) -> None:
    """Adds tokens to those that end a text of a model that generates: engines stop there, and so does its export."""
    if not model.can_generate():
        return
    for end in ends:
        if end not in (named := _named_ends(model)):
            model.generation_config.eos_token_id = [*named, end]


def _named_ends(model: PreTrainedModel) -> list[int]:
    """The end tokens of the model's generation config."""
    assert model.generation_config is not None, "a model that generates has a generation config"
    named = model.generation_config.eos_token_id
    return [] if named is None else named if isinstance(named, list) else [named]


def set_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the end tokens of the run's engines, and the padding token, into the configs of a model for export.

    `generate` of transformers stops only at the tokens that the model's own generation config names.
    """
    if not model.can_generate():
        return
    ends = end_tokens(model, tokenizer)
    generation = model.generation_config
    generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    # Not its pad_token_id: an embedding that knows its padding does not train it, and it may be the end token.
    config = model.config if "eos_token_id" in vars(model.config) else model.config.get_text_config()
    if config.eos_token_id is None:
        config.eos_token_id = generation.eos_token_id


def ending_in(tokenizer: PreTrainedTokenizerBase, end: int) -> PreTrainedTokenizerBase:
    """A tokenizer whose eos token is the end token, for an adapter: readers of it take all else from its model.

    Args:
        end: that of plain answers.
    """
    if end == tokenizer.eos_token_id:
        return tokenizer
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(end)
    return ending


def with_end_token(tokenizer: PreTrainedTokenizerBase, end: int) -> PreTrainedTokenizerBase:
    """A tokenizer that appends the end token to a text, for the export of a model that scores whole texts.

    Without it such a model reads its score from the token before. A tokenizer without a fast backend stays unchanged.

    Args:
        end: that of plain answers.
    """
    token = tokenizer.convert_ids_to_tokens(end)
    if not tokenizer.is_fast or tokenizer("a").input_ids[-1:] == [end]:
        return tokenizer
    ending = copy.deepcopy(tokenizer)
    append = processors.TemplateProcessing(single=["$A", token], special_tokens=[(token, end)])
    before = ending.backend_tokenizer.post_processor
    ending.backend_tokenizer.post_processor = append if before is None else processors.Sequence([before, append])
    return ending


def loaded_dtype(path: str | None, config: PretrainedConfig, lora: Lora | None, continued: Any) -> torch.dtype:
    """The dtype of what an export holds, where it is stored; float32 for what is new.

    Args:
        path: of the model, or of an adapter that is merged into it.
        config: of the model; names the dtype of files that only transformers can read.
        lora: null, or the adapters that train.
        continued: the `StoredAdapter` that trains on; None for a new one.
    """
    if lora is not None and lora.export == "adapter":
        return torch.float32 if continued is None else continued.dtype
    if path is None:
        return torch.float32
    files = find_files(model_path(path), config) if LOAD_WEIGHTS.get() else []
    dtype = most_common_dtype(files) or config.dtype
    return dtype if dtype in DTYPES.values() else torch.float32


def most_common_dtype(files: Sequence[str]) -> torch.dtype | None:
    """The dtype of most numbers in these files, of those of `DTYPES`; None where no number has one of them."""
    numbers = Counter[torch.dtype]()
    with open_tensors(files) as tensors:
        for tensor in tensors.values():
            if (name := tensor.get_dtype()) in DTYPES:
                numbers[DTYPES[name]] += math.prod(tensor.get_shape())
    return max(numbers, key=numbers.__getitem__, default=None)
