"""The yaml of an algorithm."""

from dataclasses import dataclass, fields, make_dataclass
from typing import Annotated, Any, Literal

from rft.algorithm.roles import ROLES
from rft.conditions import SAMPLED, ReadWith
from rft.ranges import Fraction, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass
class RewardKL:
    """KL to the reference inside the reward.

    Attributes:
        estimator: of the KL per token.
        coef: a number, or an adaptive control.
    """

    estimator: Literal["k1", "k2", "k3", "abs"]
    coef: Any


@dataclass
class TurnRewards:
    """Rewards of single turns, added to the score.

    Attributes:
        discount: per turn: the reward of turn k counts discount^(k - 1).
        weight: of their sum beside the score.
    """

    discount: Fraction
    weight: float


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


@dataclass
class AlgorithmOptions:
    """The yaml of an algorithm.

    Attributes:
        name: goes into the name of the run.
        group_size: responses per prompt.
        source: where batches come from, as a `_target_`.
        advantage: null where the loss needs none.
        advantage_clip: limits the advantages to plus or minus this number, after the estimator; null: no limit.
        loss: the policy's loss.
        terms: summands beside the loss, each with a `coef`.
        aggregation: the weight of a token; null where the loss is not per token.
        shaping: changes to the score before the advantage, in order.
        reward_kl: KL in the reward, or null.
        turn_rewards: how the column `turn_scores` is added to the score, or null.
        critic_loss: what the critic minimises, or null.
        prm_loss: what the process reward model minimises, or null.
        schedules: which models train in a step, and what happens between steps, by name; see `rft.train.schedules`.
        critic_warmup: steps at the start in which the critic alone is trained.
        correction: weights and rejections for the mismatch of rollout and training policy, or null.
        gradient_mask: which tokens pass the loss's gradient, or null for all of them.
        old_logprobs: the proximal policy: what the actor computes at the start of a step, or what the engine sampled.
        mask_truncated: rows that the length limit ended do not train (overlong filtering).
        mask_tied: groups of equal scores, before any shaping, count in no denominator (zero-variance filtering).
        pick: which rows train, by their scores before any shaping: the name of a selection (`all`, `best`,
            `best_and_worst`), or `{name: resample, power: 2.0}` for one with options.
        iteration: steps after which the reference becomes a copy of the policy; 0: it stays.
        sampler: whose weights the engine samples with: the policy's, or those of the reference, as they were when the
            iteration began.
    """

    name: str
    group_size: Annotated[PositiveInt, ReadWith(SAMPLED)]
    source: Any
    advantage: Any
    advantage_clip: PositiveFloat | None
    loss: Any
    terms: dict[str, Any]
    aggregation: Any
    shaping: dict[str, Any]
    reward_kl: RewardKL | None
    turn_rewards: TurnRewards | None
    critic_loss: Any
    prm_loss: Any
    schedules: dict[str, Any]
    critic_warmup: NonNegativeInt
    correction: CorrectionOptions | None
    gradient_mask: Any
    old_logprobs: Literal["actor", "rollout"]
    mask_truncated: Annotated[bool, ReadWith(SAMPLED)]
    mask_tied: bool
    pick: str | dict[str, Any]
    iteration: NonNegativeInt
    sampler: Literal["actor", "reference"]


def options_with_roles() -> type[AlgorithmOptions]:
    """`AlgorithmOptions` with an option for the loss of every registered role, null where the yaml does not name it."""
    names = {field.name for field in fields(AlgorithmOptions)}
    losses = [(role.loss, Any, None) for role in ROLES if role.loss is not None and role.loss not in names]
    return make_dataclass("AlgorithmOptions", losses, bases=(AlgorithmOptions,)) if losses else AlgorithmOptions
