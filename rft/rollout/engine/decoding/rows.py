"""The rows of a wave that are decoded together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rft.rollout.engine.sampling import stream


@dataclass
class Rows:
    """What decoding knows of R rows.

    Attributes:
        numbers: (R,) of the rows in their wave.
        padding: (R,) tokens before each row.
        streams: (R,) random streams.
        caps: (R,) most tokens that are sampled.
        deltas: (R, 1) added to the positions of a model that counts them in several dimensions; else None.
        tokens: (R,) the newest token.
        live: (R,) bool, whether a row has not ended.
        padded: whether a row of the wave has padding.
        most: the largest cap of the wave.
    """

    numbers: Tensor
    padding: Tensor
    streams: Tensor
    caps: Tensor
    deltas: Tensor | None
    tokens: Tensor
    live: Tensor
    padded: bool
    most: int

    @classmethod
    def of(
        cls, padding: list[int], seeds: list[int], limits: list[int], deltas: Tensor | None, device: torch.device
    ) -> "Rows":
        """All rows of a wave, before a token is sampled."""
        pads = torch.tensor(padding, device=device)
        return cls(
            numbers=torch.arange(len(pads), device=device),
            padding=pads,
            streams=stream(seeds).to(device),
            caps=torch.tensor(limits, device=device),
            deltas=deltas,
            tokens=torch.zeros_like(pads),
            live=torch.ones_like(pads, dtype=torch.bool),
            padded=any(padding),
            most=max(limits),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def compacted(self, size: int) -> Tensor:
        """The first `size` rows (size,), with all live ones: those behind take the places of rows that have ended."""
        rows = torch.arange(size, device=self.live.device)
        behind = self.live[size:].nonzero().squeeze(1) + size
        rows[(~self.live[:size]).nonzero().squeeze(1)[: len(behind)]] = behind
        return rows

    def keep(self, rows: Tensor) -> None:
        """Keeps these rows (R',) alone, in new tensors."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])
