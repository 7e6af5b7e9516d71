"""What a model that takes media reads of those of its rows, beside their tokens."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from rft.actor.forward.backbone import run_backbone
from rft.actor.packing.layout import PackedLayout, PackedSegment
from rft.batch.device import to_device
from rft.batch.encoded import EncodedText, MediaFacts


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

    def inputs(
        self, backbone: nn.Module, columns: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Tensor]]:
        """What a forward of rows takes beside their columns (B, T): tensors, positions (n, B, T), and the probe."""
        embeddings, device = cast(Any, backbone).get_input_embeddings(), columns["input_ids"].device
        probe = _probe_inputs(backbone, self.facts.probe, columns, device) if self.with_probe else {}
        return self.all_tensors(embeddings.weight.dtype, device), self.positions, probe


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


def packed_with_probe(
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


@torch.no_grad()
def tower_cost(model: PreTrainedModel, media: MediaFacts) -> float:
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
