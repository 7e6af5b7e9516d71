"""What a row costs a model: the prediction that balances ranks."""

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.forward.backbone import MediaInputs, language_part, media_elements, probe_columns, run_backbone
from rft.batch.balance import Cost, work
from rft.batch.columns import lengths, predicted
from rft.batch.encoded import MediaFacts


def head_size(config: PretrainedConfig) -> int:
    """Numbers in a query of one head of a text model."""
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)


def model_cost(model: PreTrainedModel, media: MediaFacts | None = None) -> Cost:
    """Floating-point operations of a forward and a backward through a model, all of whose weights train.

    A token takes 6 per weight of a matrix product, and attention 12 * layers * heads * head_dim per key that it looks
    at (PaLM, arXiv 2204.02311, appendix B), which are half of the row's tokens on average. The head works on trained
    tokens alone and takes 8 per weight, as the backward makes its logits again.

    Approximate: experts are counted by how many a token takes, a layer with a sliding window as if every token saw a
    full one, linear attention by its weights alone, latent attention by its `head_dim`. Frozen weights, recomputed
    activations and shared prefixes shift the parts against each other and are left out. Towers of media are counted by
    a forward over the probe, and in proportion to its numbers.

    Args:
        media: of the processor of a model that takes media.
    """
    config = model.config.get_text_config()
    options = config.to_dict()
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    weights = 0.0  # that one token passes in the layers
    for parameter in language_part(model).parameters():
        if parameter.dim() == 2 and id(parameter) not in lookups:
            weights += parameter.numel()
        elif parameter.dim() == 3 and "num_experts_per_tok" in options:  # (experts, out, in)
            weights += parameter[0].numel() * options["num_experts_per_tok"]
    heads = config.num_attention_heads
    width = heads * head_size(config)
    window = options.get("sliding_window")
    kind = "sliding_attention" if window else "full_attention"
    kinds = options.get("layer_types") or [kind] * config.num_hidden_layers
    return Cost(
        linear=6.0 * weights + 12.0 * width * kinds.count("sliding_attention") * (window or 0),
        quadratic=6.0 * width * kinds.count("full_attention"),
        head=0.0 if head is None else 8.0 * head.weight.numel(),
        media=0.0 if media is None else _tower_cost(model, media),
    )


@torch.no_grad()
def _tower_cost(model: PreTrainedModel, media: MediaFacts) -> float:
    """Floating-point operations of a forward and a backward through the towers, per number of the media."""
    probe, tensors = media.probe, media.probe.media or {}
    numbers = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    columns = probe_columns(probe, dict.fromkeys(probe.columns), model.device)
    counts = []
    for ids, inputs in ((columns["input_ids"], tensors), (torch.zeros_like(columns["input_ids"]), {})):
        tokens = TensorDict(columns | {"input_ids": ids}, batch_size=[1])
        with FlopCounterMode(display=False) as counter:
            run_backbone(model.base_model, tokens, None, MediaInputs(inputs, media))
        counts.append(counter.get_total_flops())
    return 3.0 * (counts[0] - counts[1]) / numbers


def model_flops(cost: Cost, batch: TensorDict, shared: Tensor) -> float:
    """Floating-point operations of a forward and a backward of B rows without what is computed twice.

    As `row_work`, with 6 in place of 8 per weight of the head, whose logits the backward computes again.
    """
    return float(row_work(cost._replace(head=0.75 * cost.head), batch, shared).sum())


def row_work(cost: Cost, batch: TensorDict, shared: Tensor) -> Tensor:
    """Predicted work of each row, (B,) float64.

    Args:
        cost: of a row.
        batch: B rows.
        shared: (B,) first tokens that the rows of a group compute once; each of them takes its part of those.
    """
    _, places, counts = batch["group"].unique(return_inverse=True, return_counts=True)
    saved = 1 - 1 / counts[places].double()  # (B,)
    whole, once = (work(tokens, cost.linear, cost.quadratic) for tokens in (lengths(batch), shared))
    media = cost.media * media_elements(batch)
    return whole - saved * once + cost.head * predicted(batch).sum(1) + media
