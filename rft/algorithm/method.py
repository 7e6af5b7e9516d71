"""An algorithm, put together from registered functions by its yaml: what one step does with the columns of a batch."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict

from rft.algorithm import ADVANTAGES, AGGREGATIONS, LOSSES, SHAPINGS
from rft.algorithm.aggregation import unit_weights
from rft.algorithm.kl import KLControl, build_control, kl_penalty
from rft.algorithm.objective import Objective, Term
from rft.algorithm.registries import AllSum
from rft.algorithm.rewards import token_rewards
from rft.metrics import Metrics


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
class MethodOptions:
    """The yaml of an algorithm.

    Attributes:
        name: goes into the name of the run.
        group_size: responses per prompt.
        source: where batches come from, as a `_target_`.
        advantage: null where the loss needs none.
        loss: the policy's loss.
        terms: summands beside the loss, each with a `coef`.
        aggregation: the weight of a token.
        shaping: what happens to the score before the advantage, in order.
        reward_kl: KL in the reward, or null.
        critic_loss: what the critic minimises, or null.
        old_logprobs: the proximal policy: what the actor computes at the start of a step, or what the engine sampled.
        mask_truncated: rows that the length limit ended do not train (overlong filtering).
    """

    name: str
    group_size: int
    source: Any
    advantage: Any
    loss: Any
    terms: dict[str, Any]
    aggregation: Any
    shaping: dict[str, Any]
    reward_kl: RewardKL | None
    critic_loss: Any
    old_logprobs: Literal["actor", "rollout"]
    mask_truncated: bool


class Method:
    """The functions of an algorithm with their options bound.

    Args:
        options: the yaml.
        key: its place ("algorithm").

    Raises:
        ValueError: names the key of an option that does not fit.
    """

    def __init__(self, options: MethodOptions, key: str) -> None:
        self.options = options
        self.advantage = None if options.advantage is None else ADVANTAGES.build(options.advantage, f"{key}.advantage")
        loss = LOSSES.build(options.loss, f"{key}.loss")
        terms = [_term(name, node, f"{key}.terms.{name}") for name, node in options.terms.items()]
        if loss.name in options.terms:
            raise ValueError(f"{key}.terms.{loss.name}: the loss goes by this name; give the term another")
        self.policy = Objective([Term(loss.name, loss, KLControl(1.0)), *terms])
        for term in self.policy.terms:
            if term.plugin.facts.head != "lm":
                raise ValueError(f"{key}.loss: {term.plugin.name!r} is a loss of the critic, not of the policy")
            if term.plugin.facts.unit not in ("token", "sequence"):
                raise ValueError(
                    f"{key}.loss: {term.plugin.name!r} states unit={term.plugin.facts.unit!r}; this version weighs "
                    "tokens and rows alone: register it with unit token or sequence"
                )
        self.critic = None
        if options.critic_loss is not None:
            critic_loss = LOSSES.build(options.critic_loss, f"{key}.critic_loss")
            if critic_loss.facts.head != "value":
                raise ValueError(f"{key}.critic_loss: {critic_loss.name!r} is a loss of the policy, not of the critic")
            self.critic = Objective([Term(critic_loss.name, critic_loss, KLControl(1.0))])
        self.aggregation = AGGREGATIONS.build(options.aggregation, f"{key}.aggregation")
        self.shaping = [SHAPINGS.build(node, f"{key}.shaping.{name}") for name, node in options.shaping.items()]
        self.reward_kl = options.reward_kl
        for part, given in (("shaping", self.shaping), ("reward_kl", self.reward_kl)):
            if given and self.advantage is None:
                raise ValueError(f"{key}.{part} changes scores, which only {key}.advantage reads; take it out")
        coef = 0.0 if self.reward_kl is None else self.reward_kl.coef
        self.reward_control = build_control(coef, f"{key}.reward_kl.coef")

    def stages(self) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """(yaml key, columns read, columns written) of what happens after the columns of the actors are there."""
        stages: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        if self.reward_kl is not None:
            stages.append(("algorithm.reward_kl", ("ref_logprobs", "old_logprobs"), ()))
        for plugin in self.shaping:
            stages.append(("algorithm.shaping", ("scores", *plugin.facts.reads), ()))
        if self.advantage is not None:
            facts = self.advantage.facts
            stages.append(("algorithm.advantage", ("scores", *facts.reads), tuple(facts.writes)))
        stages.append(("algorithm.aggregation", ("keep", "group"), ("loss_weights",)))
        stages.append(("algorithm.loss", self.policy.reads, ()))
        if self.critic is not None:
            stages.append(("algorithm.critic_loss", self.critic.reads, ()))
        return stages

    def reads(self) -> set[str]:
        """Every column that any part of the method reads: decides which actors exist."""
        return {column for _, columns, _ in self.stages() for column in columns}

    def filter(self, batch: TensorDict) -> None:
        """Writes `keep`, (B, T) bool."""
        keep = batch["response_mask"].clone()
        keep[:, 0] = False  # nothing predicts the first token
        batch["keep"] = keep & ~batch["truncated"][:, None] if self.options.mask_truncated else keep

    def advantages(self, batch: TensorDict, all_sum: AllSum, metrics: Metrics) -> None:
        """Writes what the advantage estimator writes: scores are shaped, KL is taken off, then the estimator runs."""
        if self.advantage is None:
            return
        scores = batch["scores"]
        for shape in self.shaping:
            scores = shape(scores, batch)
        if self.shaping:
            metrics.mean("reward/shaped", scores)
        penalty = None
        if self.reward_kl is not None:
            penalty = kl_penalty(batch["old_logprobs"], batch["ref_logprobs"], estimator=self.reward_kl.estimator)
            metrics.mean("kl/reward", penalty, batch["keep"])
        scores, rewards = token_rewards(scores, batch["keep"], penalty, self.reward_control.coef)
        for name, column in self.advantage(scores, rewards, batch, all_sum=all_sum).items():
            batch[name] = column.float()

    def weigh(self, batch: TensorDict, all_sum: AllSum) -> None:
        """Writes `loss_weights` (B, T) and `unit_weights` (B,) of a mini-batch, with totals over all ranks."""
        batch["loss_weights"] = self.aggregation(batch["keep"], batch["group"], all_sum=all_sum)
        batch["unit_weights"] = unit_weights(batch["keep"], all_sum=all_sum)

    def steer(self, numbers: dict[str, float], rows: int) -> None:
        """Tells the controllers what the KL was over the step."""
        if "kl/reward" in numbers:
            self.reward_control.update(numbers["kl/reward"], rows)
        if "kl/ref" in numbers:
            for term in self.policy.terms[1:]:
                if "ref_logprobs" in term.plugin.facts.reads:
                    term.coef.update(numbers["kl/ref"], rows)

    def state_dict(self) -> dict[str, Any]:
        """The controllers' coefficients."""
        terms = {term.name: term.coef.state_dict() for term in self.policy.terms[1:]}
        return {"reward_kl": self.reward_control.state_dict(), "terms": terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` wrote."""
        self.reward_control.load_state_dict(state["reward_kl"])
        for term in self.policy.terms[1:]:
            term.coef.load_state_dict(state["terms"][term.name])


def _term(name: str, node: Any, key: str) -> Term:
    if not isinstance(node, dict) or "coef" not in node:
        raise ValueError(f"{key}.coef is missing: every term has a coefficient; add `coef: <number>`")
    options = {k: v for k, v in node.items() if k != "coef"}
    return Term(name, LOSSES.build(options, key), build_control(node["coef"], f"{key}.coef"))


def idle_row(batch: TensorDict) -> TensorDict:
    """A row of weight zero, for a rank that has nothing left to do while others still work."""
    row = batch[:1].clone()
    row["keep"] = torch.zeros_like(row["keep"])
    row["loss_weights"] = torch.zeros(row["keep"].shape)
    row["unit_weights"] = torch.zeros(1)
    return row
