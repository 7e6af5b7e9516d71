"""Measures the gradient of a plugin on policy, and compares it with the gradient of an objective that is maximised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

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
from rft.algorithm.scores.groups import both, wins
from rft.algorithm.token_weights.aggregation import counted
from rft.errors import did_you_mean
from rft.registry import Plugin

Options = Mapping[str, Any]


def _mean(policy: TinyPolicy, logits: Tensor, values: Tensor) -> Tensor:
    """Of values (Y,), the mean over the answers to a prompt and over prompts."""
    return (policy.probabilities(logits) * values).sum() / policy.prompts


def reward(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """The mean score."""
    return _mean(policy, logits, policy.columns["scores"])


def max_reward(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """The mean of the best score of a group."""
    probabilities, scores = policy.probabilities(logits), policy.columns["scores"]
    best = [(orders * probabilities[rows].prod(1) * scores[rows].amax(1)).sum() for rows, orders in policy.groups(n)]
    return sum(best, logits.new_zeros(())) / policy.prompts


def log_likelihood(policy: TinyPolicy, logits: Tensor, order: int) -> Tensor:
    """log p, p the chance of a right answer, as its series -sum of (1 - p)^k / k up to an order. Scores are 0 or 1."""
    right = policy.probabilities(logits) * policy.columns["scores"]
    p = right.new_zeros(policy.prompts).index_add(0, policy.prompt, right)
    return -sum((((1 - p) ** k / k).sum() for k in range(1, order + 1)), logits.new_zeros(())) / policy.prompts


def process_reward(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """The mean of the score and of beta * log-ratio of a reward model to the reference, over whole answers."""
    log_ratio = (policy.columns["prm_logprobs"] - policy.columns["ref_logprobs"]).sum(1)
    return _mean(policy, logits, policy.columns["scores"] + options["beta"] * log_ratio)


def kl(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """Minus KL(policy, reference) over whole answers."""
    return -_mean(policy, logits, (policy.forward(logits)["logprobs"] - policy.columns["ref_logprobs"]).sum(1))


def likeness(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """Minus KL(policy, teacher) over whole answers."""
    return -_mean(policy, logits, (policy.forward(logits)["logprobs"] - policy.columns["teacher_logprobs"]).sum(1))


def win_rate(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """The mean chance to be preferred to an answer of this policy as it is, which is held fixed."""
    scores, opponent = policy.columns["scores"], policy.probabilities(policy.logits)
    mates = policy.prompt[:, None] == policy.prompt  # (Y, Y)
    chance = (wins(scores[:, None], scores, options["softness"]) * mates) @ opponent
    return _mean(policy, logits, chance)


def entropy_per_position(policy: TinyPolicy, logits: Tensor, n: int, options: Options) -> Tensor:
    """The entropy of the next token, summed over positions, whose own chance to be reached is held fixed."""
    entropy = policy.forward(logits)["entropy"].sum(1)
    return (policy.probabilities(logits).detach() * entropy).sum() / policy.prompts


# Expectations: f(policy, logits, rows of a group, options of the plugin).
OBJECTIVES: dict[str, Callable[[TinyPolicy, Tensor, int, Options], Tensor]] = {
    "reward": reward,
    "max reward": max_reward,
    "log likelihood to order n-1": lambda policy, logits, n, options: log_likelihood(policy, logits, n - 1),
    "log likelihood to order n": lambda policy, logits, n, options: log_likelihood(policy, logits, n),
    "reward and process reward": process_reward,
    "win rate": win_rate,
    "kl": kl,
    "likeness to the teacher": likeness,
    "entropy per position": entropy_per_position,
}
BINARY = ("log likelihood to order n-1", "log likelihood to order n")  # defined for scores of 0 and 1 alone


def _reinforce(outputs: Mapping[str, Tensor], batch: TensorDict) -> Tensor:
    return batch["advantages"] * outputs["logprobs"]


def _length(batch: TensorDict) -> Tensor:
    return batch["loss_mask"].sum(1, keepdim=True).clamp(min=1)  # (B, 1)


def outcome_likelihood(outputs: Mapping[str, Tensor], batch: TensorDict, options: Options) -> Tensor:
    """log of the chance of a row's outcome, which is sigmoid(beta * sum of log-ratios) for 1; spread over the row."""
    logits = options["beta"] * (outputs["logprobs"] - batch["ref_logprobs"]).where(batch["loss_mask"], 0.0).sum(1)
    outcome = batch["terms", options["term"]]
    likelihood = outcome * logsigmoid(logits) + (1 - outcome) * logsigmoid(-logits)
    return (likelihood / _length(batch)[:, 0])[:, None].expand(batch["loss_mask"].shape)


def _margin(outputs: Mapping[str, Tensor], batch: TensorDict) -> Tensor:
    """Of a pair, whose margin stands in both of its rows."""
    return 2 * outputs["logprobs"] * _sign(batch["chosen"])


def _sign(good: Tensor) -> Tensor:
    return (2 * good.double() - 1)[:, None]


def _by_pair(outputs: Mapping[str, Tensor], batch: TensorDict, value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A function of the two scores of a pair, spread over each of its rows."""
    chosen, rejected, whole = both(outputs["score"].where(batch["loss_mask"], 0.0).sum(1), batch)
    return (value(chosen, rejected).where(whole, 0.0)[:, None] / _length(batch)).expand(batch["loss_mask"].shape)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one * (one / other).log()).sum(-1)


def _teacher_and_policy(outputs: Mapping[str, Tensor], batch: TensorDict) -> list[Tensor]:
    """The probabilities of the teacher's candidates, and of none of them, (B, T, K + 1)."""
    probabilities = [batch["teacher_top_logprobs"].exp(), outputs["candidate_logprobs"].exp()]
    return [torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in probabilities]


def _jsd(outputs: Mapping[str, Tensor], batch: TensorDict, options: Options) -> Tensor:
    (teacher, policy), beta = _teacher_and_policy(outputs, batch), options["beta"]
    mixture = beta * teacher + (1 - beta) * policy
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(policy, mixture)


# Of given rows, on policy: f(outputs, batch, options of the plugin) -> (B, T), of which the trained tokens are summed.
SURROGATES: dict[str, Callable[[Mapping[str, Tensor], TensorDict, Options], Tensor]] = {
    "reward": lambda outputs, batch, options: _reinforce(outputs, batch),
    "reward, mean over tokens": lambda outputs, batch, options: _reinforce(outputs, batch) / _length(batch),
    "reward, times tokens": lambda outputs, batch, options: _reinforce(outputs, batch) * _length(batch),
    "likelihood": lambda outputs, batch, options: outputs["logprobs"],
    "likelihood of observations": lambda outputs, batch, options: outputs["logprobs"] * batch["observation_mask"],
    "likelihood of correct rows": lambda outputs, batch, options: (
        outputs["logprobs"] * (batch["terms", options["term"]] > 0)[:, None]
    ),
    "likelihood of the outcome": outcome_likelihood,
    "likelihood by label": lambda outputs, batch, options: outputs["logprobs"] * _sign(batch["label"]),
    "mean likelihood of chosen": lambda outputs, batch, options: (
        2 * outputs["logprobs"] * batch["chosen"][:, None] / _length(batch)
    ),
    "margin of pairs": lambda outputs, batch, options: _margin(outputs, batch),
    "mean margin of pairs": lambda outputs, batch, options: _margin(outputs, batch) / _length(batch),
    "likelihood of the preference by score": lambda outputs, batch, options: _by_pair(
        outputs, batch, lambda chosen, rejected: logsigmoid(chosen - rejected)
    ),
    "scores around zero": lambda outputs, batch, options: _by_pair(
        outputs, batch, lambda chosen, rejected: -(chosen + rejected).square()
    ),
    "likelihood of the labels": lambda outputs, batch, options: (
        batch["step_labels"] * logsigmoid(outputs["score"]) + (1 - batch["step_labels"]) * logsigmoid(-outputs["score"])
    ),
    "minus the forward KL": lambda outputs, batch, options: -_kl(*_teacher_and_policy(outputs, batch)),
    "minus the reverse KL": lambda outputs, batch, options: -_kl(*reversed(_teacher_and_policy(outputs, batch))),
    "minus the JSD": lambda outputs, batch, options: -_jsd(outputs, batch, options),
    "router balance": lambda outputs, batch, options: -outputs["router_balance"],
    "value error": lambda outputs, batch, options: -0.5 * (outputs["values"] - batch["returns"]).square(),
}


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
    targets = SURROGATES | OBJECTIVES if kind == "loss" else OBJECTIVES
    if target not in targets:
        hint = did_you_mean(target, targets)
        raise ValueError(f"{kind} {plugin.name!r} states the target {target!r}{hint} (known: {'; '.join(targets)})")
    if kind == "gradient mask":
        rows = sample_for(plugin, kind, on_policy=True)
        wanted = torch.where(rows["batch", "loss_mask"], rows["batch", "scores"][:, None], 0.0)
        gradient = evaluate(plugin, kind, rows).columns["mask"] * wanted
    elif kind == "loss" and target in SURROGATES:
        gradient, wanted = _on_given_rows(plugin, target)
    else:
        reads = () if kind == "aggregation" else plugin.facts.reads
        policy = TinyPolicy(binary=target in BINARY, reads=reads, options=plugin.options)
        gradient = expected_gradient(policy, plugin, kind)
        wanted = objective_gradient(policy, plugin, target)
    return compare(gradient, wanted, target, TOLERANCE[kind])


def compare(gradient: Tensor, wanted: Tensor, target: str, tolerance: float) -> Measured:
    """The relation of a gradient to another one, equal where they differ by a relative `tolerance` at most."""
    size, reference = float(gradient.norm()), float(wanted.norm())
    if size <= 1e-12 * reference:
        return Measured("none", target, 0.0, 0.0)
    product = float((gradient * wanted).sum())
    factor = product / reference**2
    relation = "near"
    if (gradient - wanted).norm() <= tolerance * reference:
        relation = "exact"
    elif factor > 0 and (gradient - factor * wanted).norm() <= tolerance * size:
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
    gradient = differentiated(-(weights * loss).where(weights != 0, 0.0).sum(), leaves)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    surrogate = SURROGATES[target](leaves, rows["batch"], plugin.options)
    weights = weights if weights.dim() == 2 else weights[:, None]
    wanted = differentiated((weights * surrogate).where(keep, 0.0).sum(), leaves)
    return torch.stack(list(gradient.values())), torch.stack(list(wanted.values()))
