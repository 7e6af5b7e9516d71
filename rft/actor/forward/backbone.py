"""The forward of a backbone over rows, padded or packed, with the media of the rows."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rft.actor.forward.media_inputs import MediaInputs, own_positions, probe_columns
from rft.actor.packing.layout import PackedLayout, PackedSegment
from rft.batch.device import to_device
from rft.batch.encoded import EncodedText


def run_backbone(
    backbone: nn.Module, tokens: TensorDict, layout: PackedLayout | None, media: MediaInputs | None = None
) -> tuple[Tensor, Tensor]:
    """The hidden states (N, D) of a forward, and the index (B, T) of the state of each token.

    Args:
        tokens: columns (B, T) that the model takes.
        layout: how the rows are packed; None leaves them padded. With context parallelism, the states are those of
            `layout.shard`.
        media: of the rows, for a model that takes any.
    """
    columns = {name: column for name, column in tokens.items() if name != "attention_mask"}
    ids = columns["input_ids"]
    probe: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    own = None  # (n, B, T)
    if media is not None:
        module: Any = backbone
        embeddings = module.get_input_embeddings()
        tensors, own = media.all_tensors(embeddings.weight.dtype, ids.device), media.positions
        if media.with_probe:
            probe = _probe_inputs(backbone, media.facts.probe, columns, ids.device)
    if layout is None:
        padded = {name: _with_row(column, probe.get(name)) for name, column in columns.items()}
        behind = probe.get("position_ids")
        if own is None and behind is not None:
            own = torch.arange(ids.shape[1], device=ids.device).expand(len(behind), *ids.shape)
        if own is not None:
            padded["position_ids"] = _with_row(own, behind)
        states = hidden_states(backbone, **padded, **tensors)[: len(ids), : ids.shape[1]]
        return states.flatten(0, 1), torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    if layout.shard is None:
        packed = {name: column.flatten()[layout.source] for name, column in columns.items()}
        packed |= {"position_ids": layout.positions if own is None else own.flatten(1)[:, layout.source]}
    else:
        packed = layout.shard.tokens
    if probe:
        packed, layout = _packed_with_probe(packed, probe, layout)
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


def _probe_inputs(
    backbone: nn.Module, probe: EncodedText, names: Iterable[str], device: torch.device
) -> dict[str, Tensor]:
    """The probe as columns (1, P), with `position_ids` (n, 1, P) if it has positions of its own.

    Args:
        names: columns of the batch.
    """
    columns = probe_columns(probe, names, torch.device("cpu"))
    del columns["attention_mask"]
    if (own := own_positions(backbone, columns, probe.media or {})) is not None:
        columns["position_ids"] = own[0]
    return {name: to_device(column, device) for name, column in columns.items()}


def _with_row(column: Tensor, row: Tensor | None) -> Tensor:
    """A column (..., B, T) with a row (..., 1, P) below it, both padded with zeros to the same width."""
    if row is None:
        return column
    width = max(column.shape[-1], row.shape[-1])
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1])) for part in (column, row)], -2)


def _packed_with_probe(
    packed: dict[str, Tensor], probe: dict[str, Tensor], layout: PackedLayout
) -> tuple[dict[str, Tensor], PackedLayout]:
    """Packed tokens (N,) with those of the probe behind them, as a row of their own."""
    positions, size = packed["position_ids"], probe["input_ids"].shape[1]
    behind = probe["position_ids"][:, 0] if "position_ids" in probe else torch.arange(size, device=positions.device)
    if positions.dim() < behind.dim():
        positions = positions.expand(len(behind), -1)
    found = {name: torch.cat([column, probe[name][0]]) for name, column in packed.items() if name != "position_ids"}
    found["position_ids"] = torch.cat([positions, behind.expand(*positions.shape[:-1], -1)], -1)
    segments = (*layout.segments, PackedSegment(1, size))
    return found, PackedLayout(layout.source, layout.place, layout.positions, segments, layout.shard)
