"""One packed sequence over several ranks: each rank computes a slice of the joined rows of its group."""

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.packing.layout import PackedLayout, PackedSegment, SequenceShard
from rft.batch.columns import candidates, chosen_places, predicted
from rft.strategy.parallel.context import Context


def shard_queries(tokens: TensorDict, chosen: Tensor, candidates: Tensor | None) -> Tensor:
    """The chosen tokens (Q,), or (Q, 1 + K) with their candidates behind them, whose logits are computed.

    Args:
        tokens: columns (B, T).
        chosen: (Q,) places of the chosen tokens among the flattened (B, T - 1) from the second one of each row on.
        candidates: (B, T, K) token ids, or None.
    """
    targets = tokens["input_ids"][:, 1:].flatten()[chosen]
    if candidates is None:
        return targets
    return torch.cat([targets[:, None], candidates[:, 1:].flatten(0, 1)[chosen].to(targets.dtype)], 1)


def join(layout: PackedLayout, batch: TensorDict, context: Context) -> PackedLayout:
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
