"""One packed sequence over several ranks: each computes a slice of what all of them have packed."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.packing.layout import PackedLayout, PackedSegment
from rft.batch.columns import candidates
from rft.strategy.context import Context


@dataclass(frozen=True)
class SequenceShard:
    """This rank's tokens of a sequence that its group has joined, and what the group asks of them.

    Attributes:
        context: the group.
        counts: tokens of every rank's slice.
        tokens: columns (n,) of this rank's slice, `position_ids` among them.
        asked: (Q,) places in the slice whose next token is queried.
        targets: (Q,) those next tokens, or (Q, 1 + K), with candidates behind them.
        askers: how many of them every rank asks for; they come in the order of the ranks.
        answers: how many of this rank's own questions every rank answers.
        order: (P,) where the answer to each of this rank's own questions comes in.
    """

    context: Context
    counts: list[int]
    tokens: dict[str, Tensor]
    asked: Tensor
    targets: Tensor
    askers: list[int]
    answers: list[int]
    order: Tensor

    def to(self, device: torch.device) -> "SequenceShard":
        """The same on a device."""
        tokens = {name: column.to(device) for name, column in self.tokens.items()}
        moved = {name: vars(self)[name].to(device) for name in ("asked", "targets", "order")}
        return replace(self, tokens=tokens, **moved)

    def return_outputs(self, values: Tensor) -> Tensor:
        """From the answers of this rank (Q, ...) to those to its own questions (P, ...). Differentiable."""
        shapes = [(count, *values.shape[1:]) for count in self.answers]
        arrived = self.context.exchange(values.split(self.askers), shapes)
        return torch.cat(arrived)[self.order]


def shard_queries(tokens: TensorDict, where: Tensor, candidates: Tensor | None) -> Tensor:
    """The chosen tokens (Q,), or (Q, 1 + K) with their candidates behind them.

    Args:
        tokens: columns (B, T).
        where: (B, T - 1) bool: the tokens from the second one on that are chosen.
        candidates: (B, T, K) token ids, or None.
    """
    targets = tokens["input_ids"][:, 1:][where]
    if candidates is None:
        return targets
    return torch.cat([targets[:, None], candidates[:, 1:][where].to(targets.dtype)], 1)


def join(layout: PackedLayout, batch: TensorDict, context: Context) -> PackedLayout:
    """Joins the packed rows of the ranks of a group. A collective.

    Args:
        layout: of this rank's rows, maybe without a token.
        batch: the rows.
        context: the group.
    """
    where = batch["loss_mask"][:, 1:]
    asked = layout.place[:, :-1][where]  # (P,)
    targets = shard_queries(batch["tokens"], where, candidates(batch))
    columns = {name: column.flatten()[layout.source] for name, column in batch["tokens"].items()}
    columns = {**columns, "position_ids": layout.positions}
    del columns["attention_mask"]
    gathered = context.gather((columns, layout.segments, asked, targets))

    joined = {name: torch.cat([rank_part[name] for rank_part, *_ in gathered]) for name in columns}
    starts = [0, *accumulate(len(rank_part["position_ids"]) for rank_part, *_ in gathered)]
    bounds = [starts[-1] * rank // context.size for rank in range(context.size + 1)]
    begin, end = bounds[context.rank], bounds[context.rank + 1]
    segments: list[PackedSegment] = []
    for _, rank_part, *_ in gathered:
        shift = len(segments)
        segments += [replace(s, prefix=None if s.prefix is None else s.prefix + shift) for s in rank_part]
    places = [rank_part + start for (_, _, rank_part, _), start in zip(gathered, starts, strict=False)]
    here = [(rank_part >= begin) & (rank_part < end) for rank_part in places]
    answerer = torch.bucketize(places[context.rank], torch.tensor(bounds[1:]), right=True)  # (P,)
    shard = SequenceShard(
        context=context,
        counts=[after - before for before, after in pairwise(bounds)],
        tokens={name: column[begin:end] for name, column in joined.items()},
        asked=torch.cat([rank_part[asks] for rank_part, asks in zip(places, here, strict=True)]) - begin,
        targets=torch.cat([rank_part[asks] for (*_, rank_part), asks in zip(gathered, here, strict=True)]),
        askers=[int(asks.sum()) for asks in here],
        answers=torch.bincount(answerer, minlength=context.size).tolist(),
        order=answerer.argsort(stable=True).argsort(),
    )
    return replace(layout, positions=joined["position_ids"], segments=tuple(segments), slice=shard)
