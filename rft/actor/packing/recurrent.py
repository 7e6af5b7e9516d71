"""Linear attention over packed rows.

Layers with a state that runs along the tokens (2412.06464) transformers computes for rows of one length. Here the
packed rows of each length are such a batch. Rows behind a shared prefix compute it again, each for itself: a state is
not divided into tokens.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rft.actor.packing.layout import PackedLayout, PackedSegment


def separate_rows(part: nn.Module) -> list[nn.Module]:
    """Lets the layers of a language model compute packed rows each for itself; returns these modules.

    They are those with a convolution over the tokens. They need `layout` among their arguments.
    """
    layers = [module for module in part.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]
    for module in layers:
        plain: Any = type(module)  # mypy takes no class for hashable
        module.__class__ = _separating(plain)  # as FSDP does: copies of the module keep it
    return layers


@cache
def _separating(plain: Any) -> Any:
    """A subclass whose forward computes packed rows (1, N, D) row by row."""

    @torch.compiler.disable(reason="it loops over rows of any length")
    def forward(self: Any, hidden_states: Tensor, *, layout: PackedLayout | None = None, **options: Any) -> Tensor:
        if layout is None:
            return plain.forward(self, hidden_states, **options)
        parts = hidden_states[0].split([segment.rows * segment.length for segment in layout.segments])
        results = []
        for tokens, segment in zip(parts, layout.segments, strict=True):
            rows = _rows(tokens, segment, parts)
            states = plain.forward(self, rows, **options)
            results.append(states[:, -segment.length :].flatten(0, 1))
        return torch.cat(results)[None]

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _rows(tokens: Tensor, segment: PackedSegment, parts: tuple[Tensor, ...]) -> Tensor:
    """The rows of a segment as a batch (rows, P + length, D), behind the prefix that they share."""
    rows = tokens.unflatten(0, (segment.rows, segment.length))
    if segment.prefix is None:
        return rows
    return torch.cat((parts[segment.prefix].expand(segment.rows, -1, -1), rows), 1)
