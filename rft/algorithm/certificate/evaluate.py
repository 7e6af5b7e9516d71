"""Evaluates a plugin of any kind on the rows of a `sample`."""

from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.certificate.policy import term_weights
from rft.algorithm.certificate.sample import alone, sample
from rft.algorithm.token_weights.aggregation import counted
from rft.registry import Plugin

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
