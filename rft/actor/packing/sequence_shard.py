"""Packed rows of several ranks as one sequence: each rank computes a slice of the joined rows of its group."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.packing.layout import PackedLayout, PackedSegment, shard_queries
from rft.batch.columns import candidates, chosen_places, predicted
from rft.batch.device import to_device
from rft.strategy.parallel.context import ContextParallel


@dataclass(frozen=True)
class SequenceShard:
    """This rank's tokens of a sequence that its group has joined, and the logits that it computes for the group.

    Attributes:
        context: the group.
        counts: tokens of every rank's slice.
        tokens: columns (n,) of this rank's slice, `position_ids` among them.
        queries: (Q,) positions in the slice whose next token a rank of the group needs.
        targets: (Q,) those next tokens, or (Q, 1 + K), with candidates behind them.
        sent: how many of the outputs go to each rank; they are in the order of the ranks.
        received: how many outputs each rank computes for this one.
        order: (P,) the position of the output of each of this rank's tokens among those that it receives.
    """

    context: ContextParallel
    counts: list[int]
    tokens: dict[str, Tensor]
    queries: Tensor
    targets: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor

    def to(self, device: torch.device) -> "SequenceShard":
        """The same on a device."""
        tokens = {name: to_device(column, device) for name, column in self.tokens.items()}
        moved: dict[str, Any] = {name: to_device(vars(self)[name], device) for name in ("queries", "targets", "order")}
        return replace(self, tokens=tokens, **moved)

    def return_outputs(self, values: Tensor) -> Tensor:
        """From the outputs of this rank (Q, ...) to those of its own tokens (P, ...). Differentiable."""
        shapes = [(count, *values.shape[1:]) for count in self.received]
        arrived = self.context.exchange(values.split(self.sent), shapes)
        return torch.cat(arrived)[self.order]


def join(layout: PackedLayout, batch: TensorDict, context: ContextParallel) -> PackedLayout:
    """Joins the packed rows of the ranks of a group into one sequence. A collective.

    Args:
        layout: of this rank's rows, maybe without a token.
        batch: the rows.
        context: the group.
    """
    chosen = chosen_places(predicted(batch))
    queried = layout.place[:, :-1].flatten()[chosen]  # (P,)
    targets = shard_queries(batch["tokens"], chosen, candidates(batch))
    columns = {name: column.flatten()[layout.source] for name, column in batch["tokens"].items()}
    columns = {**columns, "position_ids": layout.positions}
    del columns["attention_mask"]
    all_rows = context.gather((columns, layout.segments, queried, targets))

    joined = {name: torch.cat([rank_columns[name] for rank_columns, *_ in all_rows]) for name in columns}
    starts = [0, *accumulate(len(rank_columns["position_ids"]) for rank_columns, *_ in all_rows)]
    bounds = [starts[-1] * rank // context.size for rank in range(context.size + 1)]
    begin, end = bounds[context.rank], bounds[context.rank + 1]
    segments: list[PackedSegment] = []
    for _, rank_segments, *_ in all_rows:
        shift = len(segments)
        segments += [replace(s, prefix=None if s.prefix is None else s.prefix + shift) for s in rank_segments]
    places = [rank_queries + start for (_, _, rank_queries, _), start in zip(all_rows, starts, strict=False)]
    here = [(rank_places >= begin) & (rank_places < end) for rank_places in places]
    holder = torch.bucketize(places[context.rank], torch.tensor(bounds[1:]), right=True)  # (P,)
    shard = SequenceShard(
        context=context,
        counts=[after - before for before, after in pairwise(bounds)],
        tokens={name: column[begin:end] for name, column in joined.items()},
        queries=torch.cat([rank_places[held] for rank_places, held in zip(places, here, strict=True)]) - begin,
        targets=torch.cat([rank_targets[held] for (*_, rank_targets), held in zip(all_rows, here, strict=True)]),
        sent=[int(held.sum()) for held in here],
        received=torch.bincount(holder, minlength=context.size).tolist(),
        order=holder.argsort(stable=True).argsort(),
    )
    return PackedLayout(layout.source, layout.place, joined["position_ids"], tuple(segments), shard)
