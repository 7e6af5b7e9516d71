"""Balance over ranks: rows move so that every rank has the same predicted work in an optimizer step."""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import lengths
from rft.distributed import World
from rft.metrics import Metrics


class Cost(NamedTuple):
    """What a row costs, in floating-point operations of a forward and a backward.

    Attributes:
        linear: per token.
        quadratic: per squared length of the row.
        head: per token that trains.
    """

    linear: float
    quadratic: float
    head: float


def work(lengths: Tensor, linear: float, quadratic: float) -> Tensor:
    """Predicted work of rows of these lengths (B,): linear * length + quadratic * length^2, (B,) float64."""
    lengths = lengths.double()
    return lengths * (linear + quadratic * lengths)


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Deals items to bins whose sums are as equal as a greedy rule gets them.

    The largest differencing method of Karmarkar and Karp (1982) for several bins: of all partial solutions the two most
    uneven are put together, the fullest bin of one with the emptiest of the other. The fullest bin has at most 7/6
    (two bins) or 4/3 - 1/(3 (parts - 1)) of the least that is possible (Michiels et al., 2007), and for many items it
    is far closer.

    Args:
        costs: of each item, not negative. Their order plays no part, but for items of equal cost.
        parts: number of bins.

    Returns:
        Item numbers of each bin in order, the fullest bin first; bins may be empty.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (parts - 1)
    # (how even, a tie-break, bins from the fullest to the emptiest): sorted, so it is a heap
    heap = [(-costs[item], place, [(costs[item], [item]), *empty]) for place, item in enumerate(order)]
    while len(heap) > 1:
        _, place, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        bins = [(a + b, mine + yours) for (a, mine), (b, yours) in zip(one, reversed(other), strict=True)]
        bins.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], place, bins))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


class Parcel(NamedTuple):
    """Rows on their way to another rank, without padding.

    Attributes:
        lengths: (B,) int64.
        rows: columns with an entry a row, (B,).
        tokens: columns with an entry a token, (N,): those of one row behind those of the one before.
    """

    lengths: Tensor
    rows: dict[str | tuple[str, ...], Tensor]
    tokens: dict[str | tuple[str, ...], Tensor]


def drop_padding(batch: TensorDict) -> Parcel:
    """Every column of a batch without its padding."""
    length = lengths(batch)
    real = _real(length, batch["tokens", "attention_mask"].shape[1])  # (N,)
    parcel = Parcel(length, {}, {})
    for name, column in batch.items(include_nested=True, leaves_only=True):
        if column.dim() > 1:
            parcel.tokens[name] = column.flatten(0, 1)[real]
        else:
            parcel.rows[name] = column
    return parcel


def restore_padding(parcels: Sequence[Parcel]) -> TensorDict:
    """One batch of the rows of all parcels, padded with zeros to the longest of them."""
    length = torch.cat([parcel.lengths for parcel in parcels])
    width = max(length.tolist(), default=1)
    real = _real(length, width)  # (N,)
    batch = TensorDict({}, batch_size=[len(length)])
    for name in parcels[0].rows:
        batch[name] = torch.cat([parcel.rows[name] for parcel in parcels])
    for name in parcels[0].tokens:
        values = torch.cat([parcel.tokens[name] for parcel in parcels])
        flat = values.new_zeros(len(length) * width, *values.shape[1:]).index_copy_(0, real, values)
        batch[name] = flat.unflatten(0, (len(length), width))
    return batch


def _real(length: Tensor, width: int) -> Tensor:
    """Where the tokens of rows are, the rows padded to a width and behind one another."""
    return (torch.arange(width, device=length.device) < length[:, None]).flatten().nonzero()[:, 0]


def send(world: World, batch: TensorDict, ranks: Tensor) -> TensorDict:
    """Sends each row to the rank that `ranks` (B,) names and returns the rows that came here. A collective.

    They are in the order of the ranks that they came from; rows of one rank keep their order. `fields` stay behind.
    """
    batch = batch.exclude("fields")
    return restore_padding(world.exchange([drop_padding(batch[ranks == rank]) for rank in range(world.size)]))


class Balance:
    """Gives every rank the same predicted work.

    Where a deal is no better than where the rows are, as on one rank, none moves and nothing is copied.

    Args:
        world: the ranks.
        work: predicts the work of each row of a batch, (B,) float64.
        together: the column that names rows which stay together, `unit` or `group`.
        moves: False leaves every row where it was sampled.
    """

    def __init__(
        self, world: World, work: Callable[[TensorDict], Tensor], together: Literal["unit", "group"], moves: bool
    ) -> None:
        self._world = world
        self._work = work
        self._together = together
        self._moves = moves

    def rows(self, batch: TensorDict, metrics: Metrics) -> TensorDict:
        """The rows of a mini-batch that this rank trains, by the order of their units. A collective.

        Args:
            batch: this rank's rows of the mini-batch, those that stay together all on one rank. They may come back
                without `fields`.
            metrics: receives `balance/before` and `balance/after`.
        """
        ranks, before, after = self._plan(batch)
        metrics.add("balance/before", _over_mean(before))
        metrics.add("balance/after", _over_mean(after))
        if ranks is None:
            return batch
        moved = send(self._world, batch, ranks)
        return moved[moved["unit"].argsort(stable=True)]

    def columns(self, batch: TensorDict, compute: Callable[[TensorDict], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What `compute` says of this rank's rows, (B, T) or (B, T, K), asked where least is to do. A collective."""
        ranks, _, _ = self._plan(batch)
        if ranks is None:
            return compute(batch)
        asked = batch.exclude("fields")
        asked["home"] = torch.full_like(ranks, self._world.rank)
        asked["place"] = torch.arange(len(batch))
        moved = send(self._world, asked, ranks)
        answers = moved.select("tokens", "place")
        for name, column in (found := compute(moved)).items():
            answers[name] = column
        back = send(self._world, answers, moved["home"])
        back = back[back["place"].argsort()]
        width = batch["keep"].shape[1]
        columns = {name: column.new_zeros(len(batch), width, *column.shape[2:]) for name, column in found.items()}
        for name, column in columns.items():
            column[:, : back[name].shape[1]] = back[name]
        return columns

    def _plan(self, batch: TensorDict) -> tuple[Tensor | None, list[float], list[float]]:
        """To which rank each row goes, (B,), or None where all stay, and the work of every rank before and after."""
        if self._world.size == 1:
            return None, [1.0], [1.0]
        own = batch[self._together]
        everyones = self._world.gather((own, self._work(batch)))
        before = [float(theirs.sum()) for _, theirs in everyones]
        if not self._moves:
            return None, before, before
        items, places = torch.cat([theirs for theirs, _ in everyones]).unique(return_inverse=True)
        works = torch.cat([theirs for _, theirs in everyones])
        costs = works.new_zeros(len(items)).index_add(0, places, works)
        bins = karmarkar_karp(costs.tolist(), self._world.size)
        after = [float(costs[inside].sum()) for inside in bins]
        if max(after) >= max(before):
            return None, before, before
        ranks = torch.empty_like(items)
        for rank, inside in enumerate(bins):
            ranks[inside] = rank
        return ranks[torch.searchsorted(items, own)], before, after


def _over_mean(loads: list[float]) -> float:
    """The largest load over the mean: 1 is perfect."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
