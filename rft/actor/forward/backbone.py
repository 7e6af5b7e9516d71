"""The forward of a backbone over rows, padded or packed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rft.actor.packing.layout import PackedLayout
from rft.batch.media import media_entries
from rft.imports import import_part


def media_part(name: str) -> Any:
    """A function or a class of `rft.actor.forward.media`, for a model that takes media."""
    return import_part("rft.actor.forward.media", name, "actor.processor")


def media_elements(batch: TensorDict) -> Tensor:
    """Floating-point numbers in the media of each row, (B,) float64."""
    entries = media_entries(batch)
    counts = [sum(tensor.numel() for tensor in entry.values() if tensor.is_floating_point()) for entry in entries]
    return torch.tensor(counts or [0] * len(batch), dtype=torch.float64)


def language_part(model: PreTrainedModel) -> nn.Module:
    """The part of a model that reads tokens, without towers of other media; the backbone of a text model."""
    part = model.get_decoder()
    return model.base_model if part is None or part is model else part


ROUTER_BALANCE = "router_balance"  # the output of a language model that its routers record, see `routers.py`


def run_backbone(
    backbone: nn.Module, tokens: TensorDict, layout: PackedLayout | None, media: Any = None
) -> tuple[Tensor, Tensor]:
    """The hidden states (N, D) of a forward, and the index (B, T) of the state of each token.

    Args:
        tokens: columns (B, T) that the model takes.
        layout: how the rows are packed; None leaves them padded. With context parallelism, the states are those of
            `layout.shard`.
        media: the `MediaInputs` of the rows, for a model that takes any.
    """
    columns = {name: column for name, column in tokens.items() if name != "attention_mask"}
    ids = columns["input_ids"]
    probe: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    positions = None  # (n, B, T)
    if media is not None:
        tensors, positions, probe = media.inputs(backbone, columns)
    if layout is None:
        padded = {name: _with_row(column, probe.get(name)) for name, column in columns.items()}
        behind = probe.get("position_ids")
        if positions is None and behind is not None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(len(behind), *ids.shape)
        if positions is not None:
            padded["position_ids"] = _with_row(positions, behind)
        states = hidden_states(backbone, **padded, **tensors)[: len(ids), : ids.shape[1]]
        return states.flatten(0, 1), torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    if layout.shard is None:
        packed = {name: column.flatten()[layout.source] for name, column in columns.items()}
        packed |= {"position_ids": layout.positions if positions is None else positions.flatten(1)[:, layout.source]}
    else:
        packed = layout.shard.tokens
    if probe:
        packed, layout = media_part("packed_with_probe")(packed, probe, layout)
    inputs = {name: column.unsqueeze(-2) for name, column in packed.items()}
    return hidden_states(backbone, **inputs, **tensors, layout=layout)[0], layout.place


def hidden_states(backbone: nn.Module, **inputs: Any) -> Tensor:
    """The last hidden states (B, T, D) of a forward.

    A model that is one module with its head has no other backbone than itself: the states are what its head reads.
    """
    module: Any = backbone
    if (head := module.get_output_embeddings()) is None:
        states: Tensor = module(**inputs, use_cache=False).last_hidden_state
        return states
    read: list[Tensor] = []

    def keep(states: Tensor) -> Tensor:
        read.append(states)
        return states

    with replaced_forward(head, keep):
        module(**inputs, use_cache=False)
    [states] = read
    return states


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """In the block, a function stands in the place of a module's forward."""
    vars(module)["forward"] = function
    try:
        yield
    finally:
        del vars(module)["forward"]


def _with_row(column: Tensor, row: Tensor | None) -> Tensor:
    """A column (..., B, T) with a row (..., 1, P) below it, both padded with zeros to the same width."""
    if row is None:
        return column
    width = max(column.shape[-1], row.shape[-1])
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1])) for part in (column, row)], -2)
