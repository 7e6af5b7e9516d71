"""Rollout correction: weights and rejections for tokens that were sampled from another policy than the one that trains.

With rho_t = exp(logprobs_t - rollout_logprobs_t) over the trained tokens, a rule combines:

    metric x level x aggregate     a number for each token, row or group
    x bounds x sign of A           where it is outside
    x action                       what happens there

Sources: TIS, https://fengyao.notion.site/off-policy-rl; IcePop, arXiv 2510.18855; sequence weights, their masked form,
the geometric mean and the veto, https://richardli.xyz/rl-collapse; OPSM, arXiv 2512.02556, section 3.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import AllSum
from rft.algorithm.divergence import binary_kl, k1, k2, k3, ratio
from rft.algorithm.scores.groups import dense_numbers
from rft.metrics import Metrics

# Of d = rollout_logprobs - logprobs: the tokens are the rollout policy's.
ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
REDUCTIONS = {"product": "sum", "geometric": "mean", "sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}


@dataclass
class Rule:
    """One rule.

    Attributes:
        metric: `ratio`: rho. `k1` = -log rho, `k2` = (log rho)^2 / 2, `k3` = rho - 1 - log rho: estimates of
            KL(rollout, policy), in nats. `abs_difference`: |p - p'|, the change of the token's probability, which is
            the total variation of (p', 1 - p') and (p, 1 - p). `binary_kl`: their KL divergence, in nats.
        level: `token`, `sequence` or `group` (all trained tokens of the rows of one prompt that are in the batch).
        aggregate: over the tokens of a row or group: `max`, `min`, of a ratio `product` or (the mean in the log)
            `geometric`, of the others `sum` or `mean`; null at the token level.
        action: `clamp`: the ratio, moved into the bounds, weighs the token's loss. `zero`: the loss weighs 0 outside
            the bounds; inside them it weighs the ratio, or 1 where the metric is another. `mask`: what is outside does
            not train and is in no denominator. `drop`: nor does the rest of its group.
        low, high: bounds of the number, of a ratio those of rho itself: [0.5, 5] takes rho = 4 and refuses rho = 0.25;
            null: none.
        sign: `negative` and `positive` act on the tokens whose advantage has it.
    """

    metric: Literal["ratio", "k1", "k2", "k3", "abs_difference", "binary_kl"]
    level: Literal["token", "sequence", "group"]
    aggregate: Literal["product", "geometric", "sum", "mean", "max", "min"] | None
    action: Literal["clamp", "zero", "mask", "drop"]
    low: float | None
    high: float | None
    sign: Literal["any", "negative", "positive"]

    @property
    def by_ratio(self) -> bool:
        """Whether the ratio is the weight."""
        return self.metric == "ratio" and self.action in ("clamp", "zero")


@dataclass
class CorrectionOptions:
    """The yaml of a correction.

    Attributes:
        anchor: what the rollout policy is compared with. `old`: the proximal policy, once a step. `rollout`: without a
            proximal policy ("bypass"), the current policy, in every mini-batch.
        normalize: the weights are divided by their mean over the trained tokens of all ranks.
        rules: by names of the user's choice. The rules without a sign apply to the same tokens, so their order does not
            matter; those with a sign apply to the tokens that the others left.
    """

    anchor: Literal["old", "rollout"]
    normalize: bool
    rules: dict[str, Rule]


class Correction:
    """Rules, applied to a batch.

    Args:
        options: the yaml.
        key: its place ("algorithm.correction").

    Attributes:
        reads: columns that the batch must hold.
        weighs: whether some rule gives weights, so that `correction_weights` are not all 1.
        by_ratio: whether a ratio is among them.

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

    def unsigned(self, logprobs: Tensor, batch: TensorDict, all_sum: AllSum, metrics: Metrics) -> None:
        """Applies the rules without a sign.

        Narrows `loss_mask`; writes `correction_weights` (B, T), 0 outside it, and `rejected` (B,) bool: rows that had
        trained tokens and have none left. `correction/weight` and `correction/weight_max` are the weights before they
        are normalised; `correction/tokens_rejected` and `correction/rows_rejected` shares of what trained before;
        `correction/outside_<rule>` is the share of the tokens outside a rule's bounds.

        Args:
            logprobs: (B, T) of the anchor's policy: old, or the current one without a gradient.
            batch: whole groups of this rank.
        """
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
        """Applies the rules with a sign of the advantage, after `advantages` are computed.

        Narrows `loss_mask` and `correction_weights`; both stay as `unsigned` left them where no rule has a sign.
        """
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


def row_weights(batch: TensorDict) -> Tensor:
    """The geometric mean (B,) of `correction_weights` over the trained tokens of a row: 0 if one of them is 0."""
    keep, weights = batch["loss_mask"], batch["correction_weights"]
    return (torch.where(keep, weights, 1.0).log().sum(dim=1) / keep.sum(dim=1).clamp(min=1)).exp()


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
