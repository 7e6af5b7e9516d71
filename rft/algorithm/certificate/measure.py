"""Measures the gradient of a plugin on policy, and compares it with the gradient of an objective."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rft.algorithm.certificate.objectives import BINARY, OBJECTIVES, SURROGATES
from rft.algorithm.certificate.policy import TinyPolicy, term_weights
from rft.algorithm.certificate.sample import (
    Kind,
    alone,
    call_loss,
    differentiated,
    evaluate,
    new_state,
    prepared,
    sample_for,
)
from rft.algorithm.token_weights.aggregation import counted
from rft.errors import did_you_mean
from rft.registry import Plugin

GROUP_SIZE = 3
TOLERANCE = {"advantage": 1e-10, "loss": 1e-12, "gradient mask": 1e-12, "aggregation": 1e-6}  # weights are float32


@dataclass(frozen=True)
class Measured:
    """How a gradient relates to that of a target.

    Attributes:
        relation: as in `Gradient`.
        target: the objective.
        factor: times the target's gradient comes closest.
        cosine: of the angle between the two; 0 where there is no gradient.
    """

    relation: str
    target: str
    factor: float
    cosine: float


def measure(plugin: Plugin, kind: Kind, target: str) -> Measured:
    """The relation of a plugin's gradient to that of an objective.

    Of an advantage: sum_it A_it grad lp_it / rows, in expectation over groups of 3 rows, against the objective's.
    Of an aggregation: the same with leave-one-out advantages, and its weights instead of 1 / rows.
    Of a gradient mask: A at the tokens of given rows that pass a gradient, against A at all of them.
    Of a loss: at every token of given rows where the target is one of `SURROGATES`, and in expectation over the answers
    of the policy otherwise.

    Raises:
        ValueError: no such target is known for this kind.
    """
    known = SURROGATES | OBJECTIVES if kind == "loss" else OBJECTIVES
    if target not in known:
        hint = did_you_mean(target, known)
        raise ValueError(f"{kind} {plugin.name!r} states the target {target!r}{hint} (known: {'; '.join(known)})")
    if kind == "gradient mask":
        rows = sample_for(plugin, kind, on_policy=True)
        wanted = torch.where(rows["batch", "loss_mask"], rows["batch", "scores"][:, None], 0.0)
        found = evaluate(plugin, kind, rows).columns["mask"] * wanted
    elif kind == "loss" and target in SURROGATES:
        found, wanted = _on_given_rows(plugin, target)
    else:
        reads = () if kind == "aggregation" else plugin.facts.reads
        policy = TinyPolicy(binary=target in BINARY, reads=reads, options=plugin.options)
        found = expected_gradient(policy, plugin, kind)
        wanted = objective_gradient(policy, plugin, target)
    return compare(found, wanted, target, TOLERANCE[kind])


def compare(found: Tensor, wanted: Tensor, target: str, tolerance: float) -> Measured:
    """The relation of a gradient to another one, equal where they differ by a relative `tolerance` at most."""
    size, reference = float(found.norm()), float(wanted.norm())
    if size <= 1e-12 * reference:
        return Measured("none", target, 0.0, 0.0)
    product = float((found * wanted).sum())
    factor = product / reference**2
    relation = "near"
    if (found - wanted).norm() <= tolerance * reference:
        relation = "exact"
    elif factor > 0 and (found - factor * wanted).norm() <= tolerance * size:
        relation = "scaled"
    return Measured(relation, target, factor, product / (size * reference))


def expected_gradient(policy: TinyPolicy, plugin: Plugin, kind: Kind) -> Tensor:
    """The ascent direction of a plugin by the logits, in expectation over all answers of the policy."""
    logits = policy.logits.clone().requires_grad_()
    outputs = policy.forward(logits)
    if kind == "loss":
        total = _expected_loss(policy, plugin, outputs)
    else:
        total = (_expected_weights(policy, plugin, kind) * outputs["logprobs"]).sum()
    return differentiated(total, {"logits": logits})["logits"]


def objective_gradient(policy: TinyPolicy, plugin: Plugin, target: str) -> Tensor:
    """The gradient of an objective by the logits."""
    logits = policy.logits.clone().requires_grad_()
    total = OBJECTIVES[target](policy, logits, GROUP_SIZE, plugin.options)
    return differentiated(total, {"logits": logits})["logits"]


def _expected_weights(policy: TinyPolicy, plugin: Plugin, kind: Kind) -> Tensor:
    """The expected factor of the gradient of each token's log-probability, (Y, T)."""
    asked, terms = [], term_weights(plugin.options)

    def all_sum(tensor: Tensor) -> Tensor:
        asked.append(True)
        return tensor

    def total(together: bool) -> Tensor:
        weights = torch.zeros_like(policy.columns["old_logprobs"])
        for answers, batch, chance in policy.batches(GROUP_SIZE, together):
            if kind == "advantage":
                supplied = {"all_sum": all_sum, "term_weights": terms, "state": new_state(plugin)}
                columns = plugin(batch["scores"], batch["rewards"], batch, **supplied)
                each = columns["advantages"] / (GROUP_SIZE * policy.prompts)
            else:
                groups = batch["scores"].view(-1, GROUP_SIZE)
                others = (groups.sum(1, keepdim=True) - groups) / (GROUP_SIZE - 1)
                keep, rows = counted(batch)
                each = plugin(keep, batch["group"], rows=rows, all_sum=alone) * (groups - others).view(-1, 1)
            weights.index_add_(0, answers, chance[:, None] * each)
        return weights

    apart = total(together=kind == "aggregation")
    return total(together=True) if asked else apart  # statistics of the batch: which groups meet in it matters


def _expected_loss(policy: TinyPolicy, plugin: Plugin, outputs: dict[str, Tensor]) -> Tensor:
    """Minus the loss, summed over the tokens of an answer, in expectation over answers."""
    batch = policy.columns.clone()
    batch["group"] = batch["unit"] = torch.arange(len(batch))
    given = [outputs[name] for name in plugin.facts.outputs]
    if plugin.facts.prepare is not None:
        early = [output.detach() for output in given]
        for name, column in plugin.call("prepare", *early, batch, all_sum=alone, seed=0).items():
            batch[name] = column
    loss, _ = plugin(*given, batch)
    chance = policy.probabilities(policy.logits) / policy.prompts
    return -(chance * loss.reshape(len(batch), -1).sum(1)).sum()


def _on_given_rows(plugin: Plugin, target: str) -> tuple[Tensor, Tensor]:
    """The ascent direction of a loss and of a surrogate by the outputs of every token of the sample, on policy."""
    rows = prepared(plugin, "loss", sample_for(plugin, "loss", on_policy=True))
    leaves, loss, _ = call_loss(plugin, rows)
    weights, keep = rows["weights"], rows["batch", "loss_mask"]
    found = differentiated(-(weights * loss).where(weights != 0, 0.0).sum(), leaves)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    surrogate = SURROGATES[target](leaves, rows["batch"], plugin.options)
    weights = weights if weights.dim() == 2 else weights[:, None]
    wanted = differentiated((weights * surrogate).where(keep, 0.0).sum(), leaves)
    return torch.stack(list(found.values())), torch.stack(list(wanted.values()))
