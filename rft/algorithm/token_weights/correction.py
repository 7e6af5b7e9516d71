"""Rollout correction: weights and rejections for tokens that were sampled from another policy than the one that trains.

With rho_t = exp(logprobs_t - rollout_logprobs_t) over the trained tokens, a rule combines:

    metric x level x aggregate     a number for each token, row or group
    x bounds x sign of A           where it is outside
    x action                       what happens there

Sources: TIS, https://fengyao.notion.site/off-policy-rl; IcePop, arXiv 2510.18855; sequence weights, their masked form,
the geometric mean and the veto, https://richardli.xyz/rl-collapse; OPSM, arXiv 2512.02556, section 3.1.
"""

from collections.abc import Callable, Mapping
from math import inf

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import AllSum
from rft.algorithm.divergence import binary_kl, k1, k2, k3, ratio
from rft.algorithm.options import CorrectionOptions, Rule
from rft.algorithm.scores.groups import dense_numbers
from rft.algorithm.token_weights.base import TokenCorrection
from rft.metrics import Metrics
from rft.registry import Plugin

# Of d = rollout_logprobs - logprobs: the tokens are the rollout policy's.
ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
REDUCTIONS = {"product": "sum", "geometric": "mean", "sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}


class Correction(TokenCorrection):
    """Rules, applied to a batch.

    Args:
        options: the yaml.
        key: its place ("algorithm.correction").

    Raises:
        ValueError: names the key of an invalid rule, or of a rule that cannot be combined with another.
    """

    def __init__(self, options: CorrectionOptions, key: str) -> None:
        for name, rule in options.rules.items():
            _check(rule, f"{key}.rules.{name}")
        by_ratio = [name for name, rule in options.rules.items() if rule.by_ratio]
        if not options.rules:
            raise ValueError(f"{key}.rules is empty; add a rule, or select algorithm/correction=none")
        if len(by_ratio) > 1:
            raise ValueError(
                f"{key}.rules.{by_ratio[1]}: {by_ratio[0]} weighs by the ratio already, and it would count twice; "
                "take one of them out or make its action mask"
            )
        if options.normalize and not by_ratio:
            raise ValueError(f"{key}.normalize: no rule weighs by the ratio; set it to false")
        self.anchor = options.anchor
        self.reads = ("rollout_logprobs", "old_logprobs") if options.anchor == "old" else ("rollout_logprobs",)
        self.weighs = any(rule.action in ("clamp", "zero") for rule in options.rules.values())
        self.by_ratio = bool(by_ratio)
        self._normalize = options.normalize
        self._unsigned = {name: rule for name, rule in options.rules.items() if rule.sign == "any"}
        self._signed = {name: rule for name, rule in options.rules.items() if rule.sign != "any"}

    def check(self, loss: Plugin, copied: bool, key: str) -> None:
        if loss.facts.unit == "pair":
            raise ValueError(
                f"{key}.correction may reject one row of a pair, which {loss.name!r} needs whole; set it to null"
            )
        if self.anchor == "old" and copied:
            raise ValueError(
                f"{key}.correction.anchor=old compares old with rollout log-probabilities, but "
                f"{key}.old_logprobs=rollout makes them the same; set {key}.old_logprobs=actor or "
                f"{key}.correction.anchor=rollout"
            )
        if self.weighs and loss.facts.unit != "token" and not loss.facts.geometric_mean:
            raise ValueError(
                f"{key}.correction gives every token a weight, but {loss.name!r} has a value per {loss.facts.unit}; "
                "choose a correction that rejects (such as geo_rs) or a loss per token"
            )
        ratios = {"rollout_logprobs", "old_logprobs"} if self.anchor == "rollout" else {"rollout_logprobs"}
        if self.by_ratio and ratios & set(loss.facts.reads):
            raise ValueError(
                f"{key}.correction weighs with a ratio to the rollout policy, and {loss.name!r} does so itself: it "
                "would count twice; choose algorithm/loss=reinforce, a correction that rejects, or for a ratio to the "
                f"old policy {key}.correction.anchor=old"
            )

    def unsigned(self, logprobs: Tensor, batch: TensorDict, all_sum: AllSum, metrics: Metrics) -> None:
        before = batch["loss_mask"]
        batch["correction_weights"] = before.to(torch.promote_types(logprobs.dtype, torch.float32))
        metrics.add("correction/tokens_rejected", 0.0, before.sum())
        metrics.add("correction/rows_rejected", 0.0, before.any(dim=1).sum())
        self._apply(self._unsigned, logprobs, batch, metrics)
        batch["rejected"] = before.any(dim=1) & ~batch["loss_mask"].any(dim=1)
        if self.weighs:
            weights = batch["correction_weights"]
            metrics.mean("correction/weight", weights, batch["loss_mask"])
            if weights.numel():
                metrics.largest("correction/weight_max", weights.max())
            if self._normalize:
                total, count = all_sum(
                    torch.stack([weights.double().sum(), batch["loss_mask"].sum().double()])
                ).unbind()
                batch["correction_weights"] = weights / torch.where(total == 0, 1.0, total / count).to(weights.dtype)

    def signed(self, logprobs: Tensor, batch: TensorDict, metrics: Metrics) -> None:
        if self._signed:
            self._apply(self._signed, logprobs, batch, metrics)

    def _apply(self, rules: Mapping[str, Rule], logprobs: Tensor, batch: TensorDict, metrics: Metrics) -> None:
        before, weights = batch["loss_mask"], batch["correction_weights"]
        keep = before
        for name, rule in rules.items():
            value = measure(rule, logprobs, batch["rollout_logprobs"], before, batch["group"])
            low, high = _bounds(rule)
            # a NaN counts as inside, so that the check of the loss finds it
            outside = _acts_on(rule, batch) & ((value < low) | (value > high))  # (B, T)
            metrics.mean(f"correction/outside_{name}", outside, before)
            if rule.action == "clamp":
                weights = weights * value.clamp(low, high)
            elif rule.action == "zero":
                weights = torch.where(outside, 0.0, weights * value if rule.by_ratio else weights)
            elif rule.action == "mask":
                keep = keep & ~outside
            else:
                keep = keep & ~torch.isin(batch["group"], batch["group"][outside.any(dim=1)])[:, None]
        metrics.add("correction/tokens_rejected", (before & ~keep).sum(), 0.0)
        metrics.add("correction/rows_rejected", (before.any(dim=1) & ~keep.any(dim=1)).sum(), 0.0)
        batch["correction_weights"] = torch.where(keep, weights, 0.0).to(batch["correction_weights"].dtype)
        batch["loss_mask"] = keep


def measure(rule: Rule, logprobs: Tensor, rollout_logprobs: Tensor, keep: Tensor, group: Tensor) -> Tensor:
    """The number that a rule compares with its bounds, float64: (B, T), or (B, 1) for the levels above the token.

    Undefined at tokens that do not train.
    """
    log_rho = logprobs.double() - rollout_logprobs  # (B, T)
    if rule.metric == "ratio":
        numbers = log_rho  # aggregated in the log
    elif rule.metric == "abs_difference":
        numbers = (logprobs.double().exp() - rollout_logprobs.double().exp()).abs()
    elif rule.metric == "binary_kl":
        numbers = binary_kl(rollout_logprobs.double(), logprobs.double())
    else:
        numbers = ESTIMATES[rule.metric](-log_rho)
    if rule.aggregate is not None:
        rows = torch.arange(len(group), device=group.device)
        index = rows if rule.level == "sequence" else dense_numbers(group)
        owners = index[:, None].expand_as(keep)[keep]
        how = REDUCTIONS[rule.aggregate]
        units = numbers.new_zeros(len(group)).scatter_reduce(0, owners, numbers[keep], how, include_self=False)
        numbers = units[index][:, None]  # (B, 1)
    return ratio(numbers) if rule.metric == "ratio" else numbers


def _bounds(rule: Rule) -> tuple[float, float]:
    return -inf if rule.low is None else rule.low, inf if rule.high is None else rule.high


def _acts_on(rule: Rule, batch: TensorDict) -> Tensor:
    """The trained tokens that a rule applies to, (B, T) bool."""
    keep: Tensor = batch["loss_mask"]
    if rule.sign == "any":
        return keep
    return keep & (batch["advantages"] < 0 if rule.sign == "negative" else batch["advantages"] > 0)


def _check(rule: Rule, key: str) -> None:
    """Raises a ValueError with the key and the cure for an invalid rule."""
    low, high = _bounds(rule)
    of_ratio = rule.metric == "ratio"
    if (rule.level == "token") != (rule.aggregate is None):
        cure = "null: a token is alone" if rule.level == "token" else "the name of one"
        raise ValueError(f"{key}.aggregate: expected {cure}, at the level {rule.level}, got {rule.aggregate}")
    if rule.aggregate in (("sum", "mean") if of_ratio else ("product", "geometric")):
        cure = "product, geometric" if of_ratio else "sum, mean"
        raise ValueError(f"{key}.aggregate: {rule.metric} takes {cure}, max or min, not {rule.aggregate}")
    if low > high:
        raise ValueError(f"{key}: low={low} is above high={high}, so nothing is inside; swap them")
    if rule.metric != "k1" and (high < 0 or -inf < low < 0):
        raise ValueError(f"{key}: {rule.metric} is never negative, so neither is a bound on it")
    if rule.action != "clamp" and low == -inf and high == inf:
        raise ValueError(f"{key}: {rule.action} needs a bound; set low or high")
    if rule.action == "clamp" and not of_ratio:
        raise ValueError(f"{key}.action: only a ratio is a weight, {rule.metric} is not; choose zero, mask or drop")
    if rule.by_ratio and rule.aggregate in ("max", "min"):
        raise ValueError(f"{key}.aggregate: the {rule.aggregate} of the ratios is no weight; choose mask or drop")
    if rule.sign != "any" and (rule.by_ratio or rule.action == "drop"):
        raise ValueError(f"{key}.sign: {rule.action} of the {rule.metric} is for every sign; set it to any")
    if rule.action == "drop" and rule.level == "token":
        raise ValueError(
            f"{key}.action: drop is for rows and groups; set level to sequence and aggregate to max or min"
        )
