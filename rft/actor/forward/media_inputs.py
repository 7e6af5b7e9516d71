"""What a model that takes media reads in a forward beside the tokens of its rows."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

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
        found = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        for name, tensor in (probe or {}).items():
            found[name] = torch.cat([found[name], tensor.to(device)]) if name in found else tensor.to(device)
        found = {name: tensor[None] if name in self.facts.stacked else tensor for name, tensor in found.items()}
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in found.items()}


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
    found = own_positions(backbone, columns, media)
    return None if found is None else found[0][:, torch.tensor(rows).argsort()]


def media_elements(batch: TensorDict) -> Tensor:
    """Floating-point numbers in the media of each row, (B,) float64."""
    entries = media_entries(batch)
    counts = [sum(tensor.numel() for tensor in entry.values() if tensor.is_floating_point()) for entry in entries]
    return torch.tensor(counts or [0] * len(batch), dtype=torch.float64)


def language_part(model: PreTrainedModel) -> nn.Module:
    """The part of a model that reads tokens, without towers of other media; the backbone of a text model."""
    part = model.get_decoder()
    return model.base_model if part is None or part is model else part
