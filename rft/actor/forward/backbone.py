"""The forward of a backbone over rows, padded or packed, with the media of the rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rft.actor.forward.media_inputs import MediaInputs, own_positions, probe_columns
from rft.actor.packing.layout import PackedLayout, PackedSegment


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
    if media is not None:
        module: Any = backbone
        embeddings = module.get_input_embeddings()
        tensors = media.all_tensors(embeddings.weight.dtype, ids.device)
        if media.with_probe:
            probe = probe_columns(media.facts.probe, columns, ids.device)
            del probe["attention_mask"]
    if layout is None:
        padded = {name: _with_row(column, probe.get(name)) for name, column in columns.items()}
        if (own := own_positions(backbone, padded, tensors)) is not None:
            padded["position_ids"] = own[0]
        states = hidden_states(backbone, **padded, **tensors)[: len(ids), : ids.shape[1]]
        return states.flatten(0, 1), torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    if layout.shard is None:
        packed = {name: column.flatten()[layout.source] for name, column in columns.items()}
        positions = layout.positions
        if media is not None and (found := packed_positions(backbone, columns, layout, media)) is not None:
            positions = found
        packed |= {"position_ids": positions}
    else:
        packed = layout.shard.tokens
    if probe:
        packed, layout = _packed_with_probe(backbone, packed, probe, layout, media)
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


def packed_positions(
    backbone: nn.Module, columns: dict[str, Tensor], layout: PackedLayout, media: MediaInputs
) -> Tensor | None:
    """The model's own positions (n, N) of packed rows; None where they are those of the layout."""
    width = layout.place.shape[1]
    rows = (layout.source[layout.source % width == 0] // width).tolist()  # as the forward and media
    rows += sorted(set(range(len(layout.place))).difference(rows))  # they share their first tokens, so have no media
    found = own_positions(backbone, {name: column[rows] for name, column in columns.items()}, media.tensors)
    if found is None:
        return None
    positions = found[0].new_zeros(len(found[0]), *layout.place.shape)
    positions[:, rows] = found[0]
    return positions.flatten(1)[:, layout.source]


def _with_row(column: Tensor, row: Tensor | None) -> Tensor:
    """A column (B, T) with a row (1, P) below it, both padded with zeros to the same width."""
    if row is None:
        return column
    width = max(column.shape[1], row.shape[1])
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in (column, row)])


def _packed_with_probe(
    backbone: nn.Module,
    packed: dict[str, Tensor],
    probe: dict[str, Tensor],
    layout: PackedLayout,
    media: MediaInputs | None,
) -> tuple[dict[str, Tensor], PackedLayout]:
    """Packed tokens (N,) with those of the probe behind them, as a row of their own."""
    assert media is not None
    positions, size = packed["position_ids"], probe["input_ids"].shape[1]
    plain = torch.arange(size, device=positions.device)
    own = own_positions(
        backbone, probe, {k: t.to(positions.device) for k, t in (media.facts.probe.media or {}).items()}
    )
    behind = plain if own is None else own[0][:, 0]
    if positions.dim() < behind.dim():
        positions = positions.expand(len(behind), -1)
    found = {name: torch.cat([column, probe[name][0]]) for name, column in packed.items() if name in probe}
    found["position_ids"] = torch.cat([positions, behind.expand(*positions.shape[:-1], -1)], -1)
    return found, replace(layout, segments=(*layout.segments, PackedSegment(1, size)))
