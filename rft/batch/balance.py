"""Balance over ranks: moves rows so that every rank has the same predicted work in an optimizer step."""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import kind_of, lengths
from rft.batch.media import SharedMedia, share_media, stack_media
from rft.distributed import World
from rft.metrics import Metrics


class Cost(NamedTuple):
    """The cost of a row, in floating-point operations of a forward and a backward.

    Attributes:
        linear: per token.
        quadratic: per squared length of the row.
        head: per token that trains.
        media: per floating-point number of the media of the row.
    """

    linear: float
    quadratic: float
    head: float
    media: float = 0.0


def work(lengths: Tensor, linear: float, quadratic: float) -> Tensor:
    """Predicted work of rows of these lengths (B,): linear * length + quadratic * length^2, (B,) float64."""
    lengths = lengths.double()
    return lengths * (linear + quadratic * lengths)


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Partitions items into bins of nearly equal sums.

    The largest differencing method of Karmarkar and Karp (1982) for several bins: it merges the two most uneven partial
    solutions, the fullest bin of one with the emptiest of the other, until one solution is left. The fullest bin has at
    most 7/6 (two bins) or 4/3 - 1/(3 (parts - 1)) of the optimum (Michiels et al., 2007), and far less for many items.

    Args:
        costs: of each item, not negative. Their order matters only among items of equal cost.
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
        bins = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        bins.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], place, bins))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


class PackedRows(NamedTuple):
    """Rows without padding, as they travel to another rank.

    Attributes:
        lengths: (B,) int64.
        rows: columns per row, (B,).
        tokens: columns per token, (N,) or (N, K): the tokens of one row behind those of the row before.
        media: each distinct entry once; None where no row has media.
    """

    lengths: Tensor
    rows: dict[str | tuple[str, ...], Tensor]
    tokens: dict[str | tuple[str, ...], Tensor]
    media: SharedMedia | None


def drop_padding(batch: TensorDict) -> PackedRows:
    """Every column of a batch but `fields`, without its padding."""
    length = lengths(batch)
    real = _real(length, batch["tokens", "attention_mask"].shape[1])  # (N,)
    packed = PackedRows(length, {}, {}, share_media(batch))
    for name, column in batch.exclude("fields", "media").items(include_nested=True, leaves_only=True):
        if kind_of(name if isinstance(name, str) else name[0], column.dim()) == "token":
            packed.tokens[name] = column.flatten(0, 1)[real]
        else:
            packed.rows[name] = column
    return packed


def restore_padding(packed: Sequence[PackedRows]) -> TensorDict:
    """One batch of all rows, padded with zeros to the longest of them.

    Args:
        packed: rows with the same columns, those of each rank, at least one. Only some of them may have media.
    """
    length = torch.cat([part.lengths for part in packed])
    width = max(length.tolist(), default=1)
    real = _real(length, width)  # (N,)
    batch = TensorDict({}, batch_size=[len(length)])
    for name in packed[0].rows:
        batch[name] = torch.cat([part.rows[name] for part in packed])
    for name in packed[0].tokens:
        values = torch.cat([part.tokens[name] for part in packed])
        flat = values.new_zeros(len(length) * width, *values.shape[1:]).index_copy_(0, real, values)
        batch[name] = flat.unflatten(0, (len(length), width))
    if any(part.media is not None for part in packed):
        batch["media"] = stack_media([entry for part in packed for entry in _media_of_rows(part)])
    return batch


def _media_of_rows(packed: PackedRows) -> list[dict[str, Tensor] | None]:
    """The media of each row, None for a row without."""
    if packed.media is None:
        return [None] * len(packed.lengths)
    return [None if number < 0 else packed.media.entries[number] for number in packed.media.rows]


def _real(length: Tensor, width: int) -> Tensor:
    """Places of the real tokens in the flattened (B * width) rows, (N,)."""
    return (torch.arange(width, device=length.device) < length[:, None]).flatten().nonzero()[:, 0]


def send(world: World, batch: TensorDict, ranks: Tensor) -> TensorDict:
    """Sends each row to the rank that `ranks` (B,) names and returns the rows that this rank receives. A collective.

    They come in the order of the ranks that sent them; rows of one rank keep their order. `fields` are not sent. Media
    that rows share are sent once to each rank.
    """
    batch = batch.exclude("fields")
    return restore_padding(world.exchange([drop_padding(batch[ranks == rank]) for rank in range(world.size)]))


class MovedRows(NamedTuple):
    """Rows on the rank that computes them.

    Attributes:
        rows: that this rank computes.
        home: the rank of each, (B,), where `Balance.restore` returns what is computed; None if no row has moved.
    """

    rows: TensorDict
    home: Tensor | None


class Balance:
    """Gives every rank the same predicted work.

    If moving rows does not lower the largest work of a rank, as on one rank, no row moves and nothing is copied.

    Args:
        world: the ranks.
        work: predicts the work of each row of a batch, (B,) float64.
        together: the column that identifies rows which stay together, `unit` or `group`.
        moves: False leaves every row on its rank.
    """

    def __init__(
        self, world: World, work: Callable[[TensorDict], Tensor], together: Literal["unit", "group"], moves: bool
    ) -> None:
        self._world = world
        self._work = work
        self._together = together
        self._moves = moves

    def rows(self, batch: TensorDict, metrics: Metrics) -> TensorDict:
        """The rows of a mini-batch that this rank trains, ordered by their units. A collective.

        Args:
            batch: this rank's rows of the mini-batch; rows that stay together are all on one rank. Rows that move lose
                `fields`.
            metrics: receives `balance/before` and `balance/after`.
        """
        ranks, before, after = self._plan(batch)
        metrics.add("balance/before", _over_mean(before))
        metrics.add("balance/after", _over_mean(after))
        if ranks is None:
            return batch
        moved = send(self._world, batch, ranks)
        return moved[moved["unit"].argsort(stable=True)]

    def move(self, batch: TensorDict) -> MovedRows:
        """The rows whose columns this rank computes, so that all ranks have the same work. A collective.

        Args:
            batch: this rank's rows.
        """
        ranks = self._plan(batch)[0] if self._moves else None
        if ranks is None:
            return MovedRows(batch, None)
        outgoing = batch.exclude("fields")
        outgoing["home"] = torch.full_like(ranks, self._world.rank)
        outgoing["place"] = torch.arange(len(batch))
        moved = send(self._world, outgoing, ranks)
        return MovedRows(moved, moved["home"])

    def restore(self, columns: dict[str, Tensor], batch: TensorDict, moved: MovedRows) -> dict[str, Tensor]:
        """Columns of this rank's rows, (B, T) or (B, T, K), from where they were computed. A collective.

        Args:
            columns: of the rows that `move` returned.
            batch: the rows that it was given.
        """
        if moved.home is None:
            return columns
        results = moved.rows.select("tokens", "place")
        for name, column in columns.items():
            results[name] = column
        back = send(self._world, results, moved.home)
        back = back[back["place"].argsort()]
        width = batch["loss_mask"].shape[1]
        local = {name: column.new_zeros(len(batch), width, *column.shape[2:]) for name, column in columns.items()}
        for name, column in local.items():
            column[:, : back[name].shape[1]] = back[name]
        return local

    def _plan(self, batch: TensorDict) -> tuple[Tensor | None, list[float], list[float]]:
        """The rank of each row, (B,), or None if no row moves, and the work of every rank before and after."""
        if self._world.size == 1:
            return None, [1.0], [1.0]
        local_ids = batch[self._together]
        all_rows = self._world.gather((local_ids, self._work(batch)))  # (ids, works) of every rank
        before = [float(works.sum()) for _, works in all_rows]
        if not self._moves:
            return None, before, before
        items, places = torch.cat([ids for ids, _ in all_rows]).unique(return_inverse=True)
        works = torch.cat([works for _, works in all_rows])
        costs = works.new_zeros(len(items)).index_add(0, places, works)
        bins = karmarkar_karp(costs.tolist(), self._world.size)
        after = [float(costs[inside].sum()) for inside in bins]
        if max(after) >= max(before):
            return None, before, before
        ranks = torch.empty_like(items)
        for rank, inside in enumerate(bins):
            ranks[inside] = rank
        return ranks[torch.searchsorted(items, local_ids)], before, after


def _over_mean(loads: list[float]) -> float:
    """The largest load over the mean: 1 is perfect."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
