"""Cuts the rows of a rank into micro-batches: one forward each, a hard cap on tokens, the same number on every rank;
and predicts what a row costs a model, by which ranks are balanced.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.forward.backbone import language_part, media_elements, media_part
from rft.actor.packing.layout import PackedLayout, pack_layout, shared_prefixes
from rft.algorithm.trajectories import Trajectories, trajectories_of
from rft.batch.balance import Cost, karmarkar_karp, work
from rft.batch.collate import trim
from rft.batch.columns import chosen_places, lengths, predicted
from rft.batch.device import rows_to_device, to_device
from rft.batch.encoded import MediaFacts
from rft.batch.media import concat_media, has_media, media_entries
from rft.distributed import World
from rft.imports import import_part
from rft.strategy.context import Context


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward, on the device.

    Attributes:
        rows: their numbers in the batch that was cut; empty for the dummy row of a rank that has no rows left.
        batch: the rows, as wide as the longest of them, without `media`.
        layout: how they are packed, or None where they are padded.
        computed: tokens of the forward, padding included.
        last: no other micro-batch of the batch follows.
        media: of the rows that have any, concatenated in the order in which the forward has the rows.
        chosen: the places of the tokens whose outputs are computed; see `chosen_places`.
        trajectories: of the rows; None where each of them is one row.
        media_differ: the rows of some ranks have media of a kind that those of others do not have.
        positions: of the rows, (n, B, T), where a model counts them in its own way; see `row_positions`.
    """

    rows: Tensor
    batch: TensorDict
    layout: PackedLayout | None
    computed: int
    last: bool
    media: dict[str, Tensor]
    chosen: Tensor
    trajectories: Trajectories | None
    media_differ: bool = False
    positions: Tensor | None = None


@dataclass(frozen=True)
class MicroBatcher:
    """How micro-batches are made.

    Attributes:
        max_tokens: cap on the tokens of a forward, padding included.
        packing: rows lie behind one another; otherwise rows of like length are padded to the longest.
        share_prefix: the rows of a group compute the tokens that they begin with once.
        backbone: of the model, if it takes media.
    """

    max_tokens: int
    packing: bool
    share_prefix: bool
    backbone: nn.Module | None = None

    def __post_init__(self) -> None:
        assert self.packing or not self.share_prefix, "padded rows cannot share tokens"

    def shared(self, batch: TensorDict) -> Tensor:
        """First tokens that each row computes once with its group, (B,) int64."""
        return shared_prefixes(batch) if self.share_prefix else torch.zeros(len(batch), dtype=torch.int64)

    def micro_batches(
        self, batch: TensorDict, dummy: TensorDict, world: World, context: Context | None
    ) -> Iterator[MicroBatch]:
        """Cuts the rows of this rank; every rank gets as many micro-batches. A collective.

        Args:
            batch: this rank's rows, maybe none.
            dummy: one row, whose first token a rank computes when it has no rows left and other ranks have.
            context: the ranks that compute a sequence together, if this one does: the cap is per rank, so a row may
                have as many tokens as all of them take.

        Raises:
            ValueError: a unit of some rank is over the cap; raised on every rank, names the key and the cure.
        """
        shared = self.shared(batch)
        size = 1 if context is None else context.size
        dummy_tokens = size - 1  # all ranks but one may have only their dummy row in a joint sequence
        cap = self.max_tokens * size - dummy_tokens

        def agree(count: int) -> int:  # with the check of the cap, so that ranks wait for each other once
            counts, sizes = zip(*world.gather((count, largest_unit(batch, shared, self.packing))), strict=True)
            if (largest := max(sizes)) > cap:
                raise ValueError(
                    f"actor.micro_batch_tokens={self.max_tokens}: rows that must stay together, or the longest one, "
                    f"have {largest} tokens; set actor.micro_batch_tokens to at least "
                    f"{-(-(largest + dummy_tokens) // size)}"
                )
            return max(counts)

        if self.packing:
            cuts = cut_packed(batch, shared, cap, agree, context)
        else:
            cuts = cut_padded(batch, self.max_tokens)
            cuts += [[]] * (agree(len(cuts)) - len(cuts))
        media_differ = self._media_differ(batch, cuts, world)
        for number, rows in enumerate(cuts, start=1):
            numbers = torch.tensor(rows, dtype=torch.int64)
            part = trim(batch[numbers]) if rows else first_token(dummy)
            layout = None
            if self.packing:
                layout = pack_layout(part, shared[numbers] if rows else torch.zeros(1, dtype=torch.int64))
            computed = part["response_mask"].numel() if layout is None else len(layout.source)
            entries, positions = media_entries(part), None
            order = forward_order(len(part), layout) if entries else []
            media = concat_media(entries[row] for row in order)
            if media and self.backbone is not None:
                positions = media_part("row_positions")(self.backbone, part["tokens"], media, order)
            if context is not None and layout is not None:
                join = import_part("rft.actor.packing.sequence_shard", "join", f"{context.key}={context.size}")
                layout = join(layout, part, context)
            part = part.exclude("media") if "media" in part.keys() else part
            moved, trajectories = rows_to_device(part, world.device), trajectories_of(part)
            yield MicroBatch(
                rows=numbers,
                batch=moved,
                layout=layout and layout.to(world.device),
                computed=computed,
                last=number == len(cuts),
                media={name: to_device(tensor, world.device) for name, tensor in media.items()},
                chosen=to_device(chosen_places(predicted(part)), world.device),
                trajectories=trajectories and trajectories.of_copy(moved),
                media_differ=media_differ[number - 1],
                positions=None if positions is None else to_device(positions, world.device),
            )

    def _media_differ(self, batch: TensorDict, cuts: list[list[int]], world: World) -> list[bool]:
        """Of each micro-batch, whether ranks have media of different kinds. A collective."""
        if self.backbone is None or world.size == 1:
            return [False] * len(cuts)
        entries = media_entries(batch)
        local_kinds = [{name for row in rows if entries for name in entries[row].keys()} for rows in cuts]
        return [any(names != kinds[0] for names in kinds) for kinds in zip(*world.gather(local_kinds), strict=True)]


def forward_order(count: int, layout: PackedLayout | None) -> list[int]:
    """The numbers of rows in the order in which the forward has them.

    Last come rows whose first tokens stand in another row: they share these, so they have no media.
    """
    if layout is None:
        return list(range(count))
    width = layout.place.shape[1]
    first = (layout.source[layout.source % width == 0] // width).tolist()
    return first + sorted(set(range(count)).difference(first))


def first_token(row: TensorDict) -> TensorDict:
    """One row that does not train, cut to its first token and without media."""
    row = row.clone()
    row["tokens", "attention_mask"][:, 1:] = 0
    row["loss_mask"] = torch.zeros_like(row["loss_mask"])
    if has_media(row):
        row["tokens", "input_ids"].zero_()  # the first token may stand for media
    return trim(row.exclude("media") if "media" in row.keys() else row)


def cut_packed(
    batch: TensorDict,
    shared: Tensor,
    max_tokens: int,
    agree: Callable[[int], int],
    context: Context | None = None,
) -> list[list[int]]:
    """Row numbers of micro-batches of token counts as equal as possible, the fullest first; some may be empty.

    Args:
        batch: B rows. Units stay together.
        shared: (B,) first tokens that a row computes once with its group.
        max_tokens: cap on the tokens of a micro-batch.
        agree: from the number of micro-batches that this rank needs to the number that every rank makes.
        context: ranks that cut their rows together, under this cap.
    """
    units = _packing_units(batch, shared, max_tokens)
    local_costs = [cost for _, cost in units]
    all_costs = [local_costs] if context is None else context.gather(local_costs)
    costs = [cost for rank_costs in all_costs for cost in rank_costs]
    first = 0 if context is None else sum(len(rank_costs) for rank_costs in all_costs[: context.rank])
    bins: list[tuple[int, list[int]]] = []  # first fit of the largest first: few, but uneven
    for unit in sorted(range(len(costs)), key=lambda unit: (-costs[unit], unit)):
        number = next((n for n, (full, _) in enumerate(bins) if full + costs[unit] <= max_tokens), len(bins))
        full, inside = bins[number] if number < len(bins) else (0, [])
        bins[number : number + 1] = [(full + costs[unit], [*inside, unit])]
    count = agree(len(bins))
    cuts = karmarkar_karp(costs, count)
    if any(sum(costs[unit] for unit in inside) > max_tokens for inside in cuts):
        cuts = [inside for _, inside in sorted(bins, key=lambda part: -part[0])] + [[]] * (count - len(bins))
    local_cuts = [[unit - first for unit in inside if first <= unit < first + len(local_costs)] for inside in cuts]
    return [sorted(row for unit in inside for row in units[unit][0]) for inside in local_cuts]


def _packing_units(batch: TensorDict, shared: Tensor, max_tokens: int) -> list[tuple[list[int], int]]:
    """Rows that stay together, and their tokens: units, or as many units of a group as the cap takes."""
    rest, first = (lengths(batch) - shared).tolist(), shared.tolist()
    group = batch["group"].tolist()
    units: list[tuple[list[int], int]] = []
    open_units: dict[int, int] = {}  # of a group that shares a prefix: the packing unit that still takes rows
    for rows in _units(batch):
        prefixes = {group[row]: first[row] for row in rows}
        new = sum(rest[row] for row in rows)
        alone = new + sum(prefixes.values())
        shares = len(prefixes) == 1 and first[rows[0]] > 0
        at = open_units.get(group[rows[0]]) if shares else None
        if at is not None and units[at][1] + new <= max_tokens:
            units[at] = (units[at][0] + rows, units[at][1] + new)
        else:
            if shares:
                open_units[group[rows[0]]] = len(units)
            units.append((rows, alone))
    return units


def cut_padded(batch: TensorDict, max_tokens: int) -> list[list[int]]:
    """Row numbers of micro-batches of like lengths, longest rows first; rows x longest row is under the cap.

    Args:
        batch: B rows. Units stay together.
        max_tokens: cap on rows x longest row of a micro-batch.
    """
    length = lengths(batch).tolist()
    cuts: list[list[int]] = []
    longest = 0
    for rows in sorted(_units(batch), key=lambda rows: (-max(length[row] for row in rows), rows)):
        width = max(length[row] for row in rows)
        if cuts and (len(cuts[-1]) + len(rows)) * max(longest, width) <= max_tokens:
            cuts[-1].extend(rows)
        else:
            cuts.append(list(rows))
            longest = width
    return cuts


def largest_unit(batch: TensorDict, shared: Tensor, packing: bool) -> int:
    """Tokens that the largest unit takes in a forward; 0 where there is no row.

    Args:
        shared: (B,) first tokens that a row computes once with its group.
    """
    if packing:
        return max((tokens for _, tokens in _packing_units(batch, shared, 0)), default=0)
    length = lengths(batch).tolist()
    return max((len(rows) * max(length[row] for row in rows) for rows in _units(batch)), default=0)


def _units(batch: TensorDict) -> list[list[int]]:
    """The rows of every unit."""
    members: dict[int, list[int]] = {}
    for row, unit in enumerate(batch["unit"].tolist()):
        members.setdefault(unit, []).append(row)
    return list(members.values())


def head_size(config: PretrainedConfig) -> int:
    """Numbers in a query of one head of a text model."""
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)


def model_cost(model: PreTrainedModel, media: MediaFacts | None = None) -> Cost:
    """Floating-point operations of a forward and a backward through a model, all of whose weights train.

    A token takes 6 per weight of a matrix product, and attention 12 * layers * heads * head_dim per key that it looks
    at (PaLM, arXiv 2204.02311, appendix B), which are half of the row's tokens on average. The head works on trained
    tokens alone and takes 8 per weight, as the backward makes its logits again.

    Approximate: experts are counted by how many a token takes, a layer with a sliding window as if every token saw a
    full one, linear attention by its weights alone, latent attention by its `head_dim`. Frozen weights, recomputed
    activations and shared prefixes shift the parts against each other and are left out. Towers of media are counted by
    a forward over the probe, and in proportion to its numbers.

    Args:
        media: of the processor of a model that takes media.
    """
    config = model.config.get_text_config()
    options = config.to_dict()
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    weights = 0.0  # that one token passes in the layers
    for parameter in language_part(model).parameters():
        if parameter.dim() == 2 and id(parameter) not in lookups:
            weights += parameter.numel()
        elif parameter.dim() == 3 and "num_experts_per_tok" in options:  # (experts, out, in)
            weights += parameter[0].numel() * options["num_experts_per_tok"]
    heads = config.num_attention_heads
    width = heads * head_size(config)
    window = options.get("sliding_window")
    kind = "sliding_attention" if window else "full_attention"
    kinds = options.get("layer_types") or [kind] * config.num_hidden_layers
    return Cost(
        linear=6.0 * weights + 12.0 * width * kinds.count("sliding_attention") * (window or 0),
        quadratic=6.0 * width * kinds.count("full_attention"),
        head=0.0 if head is None else 8.0 * head.weight.numel(),
        media=0.0 if media is None else media_part("tower_cost")(model, media),
    )


def model_flops(cost: Cost, batch: TensorDict, shared: Tensor) -> float:
    """Floating-point operations of a forward and a backward of B rows without what is computed twice.

    As `row_work`, with 6 in place of 8 per weight of the head, whose logits the backward computes again.
    """
    return float(row_work(cost._replace(head=0.75 * cost.head), batch, shared).sum())


def row_work(cost: Cost, batch: TensorDict, shared: Tensor) -> Tensor:
    """Predicted work of each row, (B,) float64.

    Args:
        cost: of a row.
        batch: B rows.
        shared: (B,) first tokens that the rows of a group compute once; each of them takes its part of those.
    """
    _, places, counts = batch["group"].unique(return_inverse=True, return_counts=True)
    saved = 1 - 1 / counts[places].double()  # (B,)
    whole, once = (work(tokens, cost.linear, cost.quadratic) for tokens in (lengths(batch), shared))
    media = cost.media * media_elements(batch)
    return whole - saved * once + cost.head * predicted(batch).sum(1) + media
