"""The forward of a backbone over rows, padded or packed: what it reads of the media of the rows beside their tokens."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rft.actor.packing.layout import PackedLayout, PackedSegment
from rft.batch.device import to_device
from rft.batch.encoded import EncodedText, MediaFacts
from rft.batch.media import media_entries


@dataclass(frozen=True)
class MediaInputs:
    """The media of a forward.

    Attributes:
        tensors: of the rows that have media, concatenated in the order in which the forward has the rows.
        facts: of the model's processor.
        with_probe: the forward computes the probe of `facts` behind its rows, whose states nothing reads. FSDP gathers
            the weights of a tower only if every rank runs it, and other ranks have other media in this micro-batch.
        positions: see `row_positions`, on the device.
    """

    tensors: Mapping[str, Tensor]
    facts: MediaFacts
    with_probe: bool = False
    positions: Tensor | None = None

    def all_tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The tensors with those of the probe, floating-point ones in the dtype of the model."""
        probe = self.facts.probe.media if self.with_probe else None
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        for name, tensor in (probe or {}).items():
            tensors[name] = torch.cat([tensors[name], tensor.to(device)]) if name in tensors else tensor.to(device)
        tensors = {name: tensor[None] if name in self.facts.stacked else tensor for name, tensor in tensors.items()}
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def probe_columns(probe: EncodedText, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The probe as columns (1, P) of the tokens of a batch.

    Args:
        names: columns of the batch.
    """
    ids = torch.tensor([probe], device=device)
    columns = {name: torch.tensor([probe.column(name)], device=device) for name in names}
    return columns | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def own_positions(
    backbone: nn.Module, columns: Mapping[str, Tensor], media: Mapping[str, Tensor], mask: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """The positions of a model that counts them in several dimensions (M-RoPE, 2409.12191), by its own method.

    Args:
        columns: of tokens (B, T).
        media: of all rows, in their order.
        mask: (B, T), False for padding; None where padding is on the right.

    Returns:
        Positions (n, B, T), and (B, 1), what is added to the number of a token behind the row; None for a model, or for
        rows without media, whose positions are the numbers of the tokens.
    """
    if not media or "get_rope_index" not in dir(type(backbone)):
        return None
    given, module = {**columns, **media, "attention_mask": mask}, cast(Any, backbone)
    if module.get_output_embeddings() is not None:  # a module with its head: the method wants numbers of `generate`
        ids = columns["input_ids"]
        given["attention_mask"] = torch.ones_like(ids) if mask is None else mask
        positions = module._prepare_position_ids_for_generation(ids, given)[1:]  # without those of text alone
        return positions, module.rope_deltas
    names = inspect.signature(module.get_rope_index).parameters
    positions, deltas = module.get_rope_index(**{name: value for name, value in given.items() if name in names})
    return positions, deltas


def row_positions(
    backbone: nn.Module, tokens: TensorDict, media: Mapping[str, Tensor], rows: list[int]
) -> Tensor | None:
    """The positions (n, B, T) of `own_positions` for rows padded on the right; None as there.

    A model reads every row and every medium to count them, so the tensors have to be in host memory.

    Args:
        tokens: columns (B, T) that the model takes.
        media: of all rows, in the order of `rows`.
        rows: the B numbers of all rows.
    """
    columns = {name: column[rows] for name, column in tokens.items() if name != "attention_mask"}
    counted = own_positions(backbone, columns, media)
    return None if counted is None else counted[0][:, torch.tensor(rows).argsort()]


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
    positions = None  # (n, B, T)
    if media is not None:
        module: Any = backbone
        embeddings = module.get_input_embeddings()
        tensors, positions = media.all_tensors(embeddings.weight.dtype, ids.device), media.positions
        if media.with_probe:
            probe = _probe_inputs(backbone, media.facts.probe, columns, ids.device)
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
    if (positions := own_positions(backbone, columns, probe.media or {})) is not None:
        columns["position_ids"] = positions[0]
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
    columns = {name: torch.cat([column, probe[name][0]]) for name, column in packed.items() if name != "position_ids"}
    columns["position_ids"] = torch.cat([positions, behind.expand(*positions.shape[:-1], -1)], -1)
    segments = (*layout.segments, PackedSegment(1, size))
    return columns, PackedLayout(layout.source, layout.place, layout.positions, segments, layout.shard)
