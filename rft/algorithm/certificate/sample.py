"""A small batch with the irregularities of real ones (unequal lengths, gaps, a row without a trained token), and the
result of a plugin of any kind on its rows.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.certificate.policy import term_weights
from rft.algorithm.token_weights.aggregation import counted
from rft.registry import Plugin

KEEP = torch.tensor(
    [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 1, 1, 1],  # a gap
        [0, 0, 0, 0, 0, 0, 0, 0],  # nothing trained
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 0],
    ],
    dtype=torch.bool,
)
GROUP = torch.tensor([4, 4, 4, 1, 6, 6, 1])
PARTS = {  # of the batch, as micro-batches; groups are whole where a plugin counts groups
    "row": (torch.tensor([0, 1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6])),
    "pair": (torch.tensor([0, 2, 5]), torch.tensor([1, 4]), torch.tensor([3, 6])),
    "group": (torch.tensor([0, 1, 2]), torch.tensor([3, 6]), torch.tensor([4, 5])),
}
PAIR = torch.tensor([9, 2, 4, 5, 2, 9, 5])  # units of a source of pairs; the row without a trained token is left alone
TURN = torch.where(KEEP, (KEEP.cumsum(1) + 1) // 2, 0)  # of two tokens each
MARKS = {  # columns that are not random
    "chosen": torch.tensor([1, 0, 1, 1, 1, 0, 0], dtype=torch.bool),
    "label": torch.tensor([1, 0, 1, 1, 0, 1, 0], dtype=torch.bool),
    "mismatched": torch.tensor([0, 0, 0, 0, 0, 1, 1], dtype=torch.bool),
    "turn": TURN,
    "anchor": torch.where(KEEP, (TURN + torch.arange(len(KEEP))[:, None]) % 3, 0),  # two states; 0: not known
    "agent": torch.arange(len(KEEP)) % 2,
    "observation_mask": KEEP,
}

CANDIDATES = 3
OF_CANDIDATES = ("teacher_top_logprobs", "candidate_logprobs")  # (B, T, CANDIDATES)


def alone(tensor: Tensor) -> Tensor:
    """`all_sum` of one rank."""
    return tensor


def of_candidates(generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Log-probabilities of some tokens out of one more, (B, T, CANDIDATES); the larger the scale, the farther apart."""
    logits = scale * torch.randn(*KEEP.shape, CANDIDATES + 1, dtype=torch.float64, generator=generator)
    return logits.log_softmax(-1)[..., :CANDIDATES]


def sample(reads: Sequence[str], outputs: Sequence[str], options: dict[str, Any], on_policy: bool) -> TensorDict:
    """Rows as one TensorDict of `batch`, and of the `outputs` of a model for them: one index reaches all columns.

    Args:
        reads: columns of the batch, beside those that every batch has.
        outputs: of the model.
        options: of the plugin; an option `term` names a reward term.
        on_policy: current, old and rollout policy are one, the values are those of the batch, and the advantages of a
            row are equal and sum to 0 over a group; for preferences, and beside advantages, the reference is the same,
            too. If not, all columns are random.
    """
    generator = torch.Generator().manual_seed(0)
    rows = len(KEEP)

    def column(name: str) -> Any:
        normal = torch.randn(KEEP.shape, dtype=torch.float64, generator=generator)
        if name == "terms":
            terms = {term: (normal[:, i] > 0).double() for i, term in enumerate(term_weights(options))}
            return TensorDict(terms, batch_size=[rows])
        if name in MARKS:
            return MARKS[name]
        if name in OF_CANDIDATES:
            return of_candidates(generator)
        if name.endswith("scores"):
            return normal[:, 0].clone()
        if name.endswith("logprobs"):
            return -normal.abs()
        return normal.abs() if name in ("entropy", "sum_p_squared") else normal

    batch = TensorDict({"loss_mask": KEEP, "response_mask": KEEP, "group": GROUP}, batch_size=[rows])
    batch["unit"] = PAIR if "chosen" in reads else torch.arange(rows) * 3
    batch["truncated"] = torch.arange(rows) % 3 == 0
    for name in ("scores", "rewards", *reads):
        if name not in batch.keys():
            batch[name] = column(name)
    given = {name: column(name) for name in outputs}
    if on_policy:
        same = {"old_logprobs": "logprobs", "rollout_logprobs": "logprobs", "values": "values"}
        if {*MARKS, "advantages"} & set(reads):
            same["ref_logprobs"] = "logprobs"
        for name, output in same.items():
            if name in reads and output in given:
                batch[name] = given[output]
        if "advantages" in reads:
            mates = ((GROUP[:, None] == GROUP) & KEEP.any(1)).double()  # (B, B)
            scores = 3 * batch["scores"]  # so far apart that bounds on a covariance have something between them
            batch["advantages"] = (scores - mates @ scores / mates.sum(1))[:, None].expand(KEEP.shape).clone()
    return TensorDict({"batch": batch, "outputs": given}, batch_size=[rows])


Kind = Literal["advantage", "loss", "gradient mask", "aggregation"]


class Outcome(NamedTuple):
    """The result of a plugin for some rows.

    Attributes:
        columns: of every row, (B, T) each: advantages, weights, a mask, or gradients of a loss by the outputs.
        sums: over all rows: a loss and its statistics.
    """

    columns: dict[str, Tensor]
    sums: dict[str, Tensor]


def sample_for(plugin: Plugin, kind: Kind, on_policy: bool) -> TensorDict:
    """Rows with what the plugin reads, and with weights for a loss: unequal from row to row, where it is per token."""
    if kind == "aggregation":
        return sample((), (), {}, on_policy)
    outputs = () if kind == "advantage" else plugin.facts.outputs
    rows = sample(plugin.facts.reads, outputs, plugin.options, on_policy)
    if kind == "loss":
        keep = rows["batch", "loss_mask"]
        each = keep.any(1) / (3.0 + torch.arange(len(keep), dtype=torch.float64))  # (B,)
        rows["weights"] = keep * each[:, None] if plugin.facts.unit == "token" else keep.any(1).double() / len(keep)
    return rows


def new_state(plugin: Plugin) -> Any:
    """What an advantage remembers, before the first step; None if it remembers nothing."""
    return None if plugin.facts.state is None else plugin.facts.state()


def prepared(plugin: Plugin, kind: Kind, rows: TensorDict) -> TensorDict:
    """Rows as a mini-batch, with the columns that a loss prepares."""
    if kind != "loss" or plugin.facts.prepare is None:
        return rows
    rows = rows.clone()
    given = [rows["outputs", name] for name in plugin.facts.outputs]
    for name, column in plugin.call("prepare", *given, rows["batch"], all_sum=alone, seed=0).items():
        rows["batch", name] = column
    return rows


def call_loss(plugin: Plugin, rows: TensorDict) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """The outputs as leaves, the loss of prepared rows, and its statistics."""
    leaves = {name: rows["outputs", name].clone().requires_grad_() for name in plugin.facts.outputs}
    loss, statistics = plugin(*leaves.values(), rows["batch"])
    return leaves, loss, statistics


def evaluate(plugin: Plugin, kind: Kind, rows: TensorDict) -> Outcome:
    """Calls the plugin on prepared rows."""
    batch = rows["batch"]
    if kind == "advantage":
        supplied = {"all_sum": alone, "term_weights": term_weights(plugin.options), "state": new_state(plugin)}
        return Outcome(plugin(batch["scores"], batch["rewards"], batch, **supplied), {})
    if kind == "aggregation":
        keep, counts = counted(batch)
        return Outcome({"weights": plugin(keep, batch["group"], rows=counts, all_sum=alone)}, {})
    if kind == "gradient mask":
        given = [rows["outputs", name] for name in plugin.facts.outputs]
        return Outcome({"mask": plugin(*given, batch, all_sum=alone, seed=0).double()}, {})
    leaves, loss, statistics = call_loss(plugin, rows)
    total = (rows["weights"] * loss).where(rows["weights"] != 0, 0.0).sum()
    sums = {"loss": total.detach(), **{name: number.sum() for name, number in statistics.items()}}
    return Outcome(differentiated(total, leaves), sums)


def differentiated(total: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient by every leaf, 0 where there is none."""
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))
