"""An algorithm: the registered functions that its yaml names, their options bound. `step.py` calls them in order."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, AGGREGATIONS, GRADIENT_MASKS, LOSSES, SELECTIONS, SHAPINGS, AllRows, AllSum
from rft.algorithm.divergence import kl_penalty
from rft.algorithm.objective import Control, Objective, Term, build_control
from rft.algorithm.options import AlgorithmOptions, CorrectionOptions
from rft.algorithm.roles import ROLES
from rft.algorithm.scores.groups import both, informative_groups
from rft.algorithm.scores.rewards import add_turn_rewards, token_rewards
from rft.algorithm.token_weights.aggregation import counted, unit_weights
from rft.algorithm.token_weights.base import TokenCorrection
from rft.algorithm.trajectories import joined_rows
from rft.batch.scores import is_scored
from rft.errors import Checks, FunctionError, spell_type
from rft.imports import import_part
from rft.metrics import Metrics
from rft.registry import Plugin, Registry
from rft.stateful import Stateful

# A part, which a run with `algorithm.correction` imports: its module and its class.
CORRECTION = ("rft.algorithm.token_weights.correction", "Correction")


class Algorithm:
    """The functions of an algorithm with their options bound.

    Args:
        options: the yaml.
        key: its place ("algorithm").
        term_weights: the weight of every reward term, for advantages that combine raw terms.

    Raises:
        ValueError: names the key of an option that does not fit.
    """

    def __init__(self, options: AlgorithmOptions, key: str, term_weights: Mapping[str, float] | None = None) -> None:
        self.options = options
        self.term_weights = term_weights
        check = Checks()

        def build(registry: Registry, node: Any, name: str) -> Any:
            return None if node is None else check.attempt(registry.build, node, f"{key}.{name}")

        self.advantage: Plugin | None = build(ADVANTAGES, options.advantage, "advantage")
        loss = check.attempt(LOSSES.build, options.loss, f"{key}.loss")
        terms = [check.attempt(_term, name, node, f"{key}.terms.{name}") for name, node in options.terms.items()]
        mask = build(GRADIENT_MASKS, options.gradient_mask, "gradient_mask")
        self.correction: TokenCorrection | None = None
        if options.correction is not None:
            self.correction = check.attempt(_correction, options.correction, f"{key}.correction")
        learners = {
            role.key: check.attempt(LOSSES.build, node, f"{key}.{role.loss}")
            for role in ROLES
            if role.loss is not None and (node := vars(options).get(role.loss)) is not None
        }
        self.aggregation: Plugin | None = build(AGGREGATIONS, options.aggregation, "aggregation")
        self.shaping: dict[str, Plugin] = {
            name: check.attempt(SHAPINGS.build, node, f"{key}.shaping.{name}") for name, node in options.shaping.items()
        }
        self.reward_kl = options.reward_kl
        coef = 0.0 if self.reward_kl is None else self.reward_kl.coef
        self.reward_control = check.attempt(build_control, coef, f"{key}.reward_kl.coef")
        pick = {"name": options.pick} if isinstance(options.pick, str) else options.pick
        self.selection: Plugin = build(SELECTIONS, pick, "pick")
        if loss is not None and loss.name in options.terms:
            check.messages.append(f"{key}.terms.{loss.name}: the loss goes by this name; give the term another")
        check.end()
        self.shaping_states: dict[str, Any] = {}
        for name, plugin in self.shaping.items():
            if plugin.facts.state is not None:
                self.shaping_states[name] = check.attempt(_state, plugin, f"{key}.shaping.{name}")
        self.advantage_state: Any = None
        if self.advantage is not None and self.advantage.facts.state is not None:
            self.advantage_state = check.attempt(_state, self.advantage, f"{key}.advantage")
        check.end()
        weighs = self.correction is not None and self.correction.weighs
        self.policy = Objective([Term(loss.name, loss, Control(1.0)), *terms], mask, weighs)
        self.learners = {  # what the models beside the policy minimise, by their role
            role: Objective([Term(plugin.name, plugin, Control(1.0))]) for role, plugin in learners.items()
        }

    def functions(self) -> dict[str, Callable]:
        """The functions that the yaml names, by what messages call them."""
        objectives = (self.policy, *self.learners.values())
        plugins = [term.plugin for objective in objectives for term in objective.terms]
        plugins += [*self.shaping.values(), self.selection]
        plugins += [each for each in (self.advantage, self.policy.mask, self.aggregation) if each is not None]
        return {plugin.title: plugin.function for plugin in plugins}

    def stages(self) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """(yaml key, columns read, columns written) of every stage after the models have computed their columns."""
        stages = self.stages_before_update()
        stages.append(("algorithm.aggregation", ("loss_mask", "group"), ("loss_weights",)))
        stages.append(("algorithm.loss", self.policy.reads, ()))
        stages += [(f"algorithm.{role}_loss", objective.reads, ()) for role, objective in self.learners.items()]
        return stages

    def stages_before_update(self) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Those of the stages that come before the first update."""
        stages: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        if self.correction is not None:
            stages.append(("algorithm.correction", self.correction.reads, ()))
        if self.reward_kl is not None:
            stages.append(("algorithm.reward_kl", ("ref_logprobs", "old_logprobs"), ()))
        for plugin in self.shaping.values():
            stages.append(("algorithm.shaping", ("scores", *plugin.facts.reads), ()))
        if self.options.turn_rewards is not None:
            stages.append(("algorithm.turn_rewards", ("turn", "turn_scores"), ()))
        if self.advantage is not None:
            facts = self.advantage.facts
            stages.append(("algorithm.advantage", ("scores", *facts.reads), tuple(facts.writes)))
        return stages

    def reads(self) -> set[str]:
        """Every column that any part of the algorithm reads. They decide which models exist."""
        return {column for _, columns, _ in self.stages() for column in columns}

    def reads_scores(self) -> bool:
        """Whether the scores decide what trains: through the advantage, or through the choice of rows."""
        chooses = self.selection.facts.groups or self.options.mask_tied
        return chooses or (self.advantage is not None and not self.unread_advantage())

    def unread(self) -> dict[str, str]:
        """Options of the algorithm that nothing reads, and why."""
        names = ("advantage", "advantage_clip", "shaping", "reward_kl", "turn_rewards")
        reasons = dict.fromkeys(names, self.unread_advantage())
        if "old_logprobs" not in self.reads() and not self.current_outputs:
            reasons["old_logprobs"] = f"the loss {self.policy.terms[0].name!r} reads no old_logprobs"
        return {name: reason for name, reason in reasons.items() if reason}

    def unread_advantage(self) -> str:
        """Why nothing reads what the advantage writes; empty if something reads it, or if there is no advantage."""
        if self.advantage is None or self.selection.facts.resamples:
            return ""
        reads = {column for objective in (self.policy, *self.learners.values()) for column in objective.reads}
        writes = tuple(self.advantage.facts.writes)
        return "" if reads & set(writes) else f"the loss {self.policy.terms[0].name!r} reads no {' or '.join(writes)}"

    def old_columns(self, updates: int) -> dict[str, str]:
        """Outputs of the policy that are computed before the update, and the columns they become.

        Args:
            updates: optimizer steps on the batch. With one, the old policy is the current one: a loss alone needs no
                pass for it.
        """
        early = {column for _, columns, _ in self.stages_before_update() for column in columns}
        wanted = {"sum_p_squared": "sum_p_squared"} if "sum_p_squared" in early else {}
        if self.options.old_logprobs == "actor":
            if "old_logprobs" in early or (updates > 1 and "old_logprobs" in self.policy.reads):
                wanted["logprobs"] = "old_logprobs"
            wanted |= {name: f"old_{name}" for name in self.current_outputs}
        return wanted

    def idle_options(self, updates: int) -> list[str]:
        """Options, as `loss.clip_low`, that have no effect because ratios to the old policy are 1 in every update.

        Args:
            updates: optimizer steps on the batch. With one, the columns of the old policy are those of the current one,
                unless the engine's log-probabilities are in their place.
        """
        plugins = {f"terms.{term.name}": term.plugin for term in self.policy.terms}
        plugins["loss"] = plugins.pop(f"terms.{self.policy.terms[0].name}")
        plugins |= {f"{role}_loss": objective.terms[0].plugin for role, objective in self.learners.items()}
        return [
            f"{place}.{name}"
            for place, plugin in plugins.items()
            if updates == 1 and (self.options.old_logprobs == "actor" or "old_logprobs" not in plugin.facts.reads)
            for name in plugin.facts.idle_on_policy
            if name not in plugin.options or plugin.options[name] is not None  # null turns an option off
        ]

    def build_loss_mask(self, batch: TensorDict) -> None:
        """Writes `loss_mask`, (B, T) bool; a pair trains only if both of its rows do.

        For a loss with the unit `group`, `unit` becomes `group`. A selection that masks writes its own columns, too.
        Whole trajectories are truncated, scored, compared and selected.
        """
        with joined_rows(batch) as (rows, _):
            self._mask(rows)

    def _mask(self, batch: TensorDict) -> None:
        if self.policy.terms[0].plugin.facts.unit == "group":
            batch["unit"] = batch["group"]
        keep = batch["response_mask"].clone()
        keep[:, 0] = False  # nothing predicts the first token
        if self.options.mask_truncated:
            keep &= ~batch["truncated"][:, None]
        scored = self._scored(batch)
        keep &= scored[:, None]
        if self.options.mask_tied:
            keep[scored] &= informative_groups(batch["scores"][scored], batch["group"][scored])[:, None]
        if self.selection.facts.masks:
            counts, columns = self.selection(batch[scored])
            for name, column in columns.items():
                batch[name] = batch[name].clone() if name in batch.keys() else column.new_zeros(len(batch))
                batch[name][scored] = column
            keep[scored] &= (counts > 0)[:, None]
        batch["loss_mask"] = keep
        if self.policy.terms[0].plugin.facts.unit == "pair":
            *_, whole = both(torch.zeros(len(batch)), batch)
            batch["loss_mask"] = keep & whole[:, None]

    @staticmethod
    def _scored(batch: TensorDict) -> Tensor:
        """The rows that take part in comparisons, (B,) bool: those with a score, where the source samples."""
        return is_scored(batch["scores"]) if "scores" in batch.keys() else torch.ones_like(batch["truncated"])

    def select_rows(self, batch: TensorDict, all_rows: AllRows, seed: int) -> TensorDict:
        """The rows that train: those that the selection left in the loss mask, or each as often as it is drawn."""
        if self.selection.facts.masks:
            return batch[batch["loss_mask"].any(1)]
        scored = batch[self._scored(batch)] if self.selection.facts.resamples else batch
        counts, _ = self.selection(scored, all_rows=all_rows, seed=seed)
        return batch if counts is None else scored[torch.arange(len(scored)).repeat_interleave(counts)]

    def estimate_advantages(self, batch: TensorDict, all_sum: AllSum, metrics: Metrics) -> None:
        """Corrects for the rollout policy, then writes what the advantage estimator writes.

        Of the rows that count, see `_counted`, scores are shaped, the KL is subtracted, the estimator runs, and the
        advantages are limited. The rows of a trajectory are one: its score counts once, and returns run through it.

        Raises:
            ValueError: a score is not finite; names the rows.
        """
        correction = self.correction if self.correction and self.correction.anchor == "old" else None
        with joined_rows(batch) as (rows, _):
            if correction is not None:
                correction.unsigned(rows["old_logprobs"], rows, all_sum, metrics)
            if self.advantage is not None:
                self._estimate(rows, all_sum, metrics)
            if correction is not None:
                correction.signed(rows["old_logprobs"], rows, metrics)

    def _estimate(self, batch: TensorDict, all_sum: AllSum, metrics: Metrics) -> None:
        """Writes what the advantage estimator computes from the rows that count; 0 in the others."""
        assert self.advantage is not None
        places = self._counted(batch).nonzero()[:, 0]
        rows = batch if len(places) == len(batch) else batch[places]
        scores = self._shaped(rows, places, all_sum, metrics)
        penalty = None
        if self.reward_kl is not None:
            penalty = kl_penalty(rows["old_logprobs"], rows["ref_logprobs"], estimator=self.reward_kl.estimator)
            metrics.mean("kl/reward", penalty, rows["loss_mask"])
        if {"teacher_logprobs", "old_logprobs"} <= set(rows.keys()):
            metrics.mean("kl/teacher", rows["old_logprobs"] - rows["teacher_logprobs"], rows["loss_mask"])
        scores, rewards = token_rewards(scores, rows["loss_mask"], penalty, self.reward_control.coef)
        if (turns := self.options.turn_rewards) is not None:
            scores, rewards = add_turn_rewards(scores, rewards, rows, turns.discount, turns.weight)
        supplied = {"all_sum": all_sum, "term_weights": self.term_weights, "state": self.advantage_state}
        columns = self.advantage(scores, rewards, rows.exclude("fields"), **supplied)
        if not isinstance(columns, dict):
            raise FunctionError(
                f"{self.advantage.title} returned {spell_type(columns)}; it must return a dict of columns"
            )
        for name, values in columns.items():
            column = _checked(self.advantage, values, rewards.shape)
            if name == "advantages" and (limit := self.options.advantage_clip) is not None:
                metrics.mean("clip/advantage", column.abs() > limit, rows["loss_mask"])
                column = column.clamp(-limit, limit)
            batch[name] = torch.zeros(batch["loss_mask"].shape, device=scores.device)
            batch[name][places] = column.float()
        if self.advantage_state is not None:
            for number, value in self.advantage_state.numbers().items():  # the same on every rank
                metrics.largest(f"advantage/{number}", value)

    def _counted(self, batch: TensorDict) -> Tensor:
        """The rows whose scores count, (B,) bool: those with a score, neither rejected nor masked in a tied group."""
        scored = is_scored(batch["scores"])
        counted = scored & ~batch["rejected"] if "rejected" in batch.keys() else scored.clone()
        if self.options.mask_tied:
            counted[scored] &= informative_groups(batch["scores"][scored], batch["group"][scored])
        return counted

    def _shaped(self, rows: TensorDict, places: Tensor, all_sum: AllSum, metrics: Metrics) -> Tensor:
        """The scores (B,) of the rows at these places of the batch, after every shaping."""
        scores: Tensor = rows["scores"]
        for name, shape in self.shaping.items():
            supplied = {"all_sum": all_sum, "state": self.shaping_states.get(name)}
            scores = _checked(shape, shape(scores, rows, **supplied), scores.shape)
        if wrong := (~scores.isfinite()).nonzero()[:, 0].tolist():
            named = ", ".join(shape.name for shape in self.shaping.values())
            shaped = f" after algorithm.shaping ({named})" if named else ""
            numbers = places[wrong].tolist()
            raise FunctionError(f"the scores of rows {numbers} are not finite{shaped}: {scores[wrong].tolist()}")
        if self.shaping:
            metrics.mean("reward/shaped", scores)
        for name, state in self.shaping_states.items():
            for number, value in state.numbers().items():  # the same on every rank
                metrics.largest(f"shaping/{name}/{number}", value)
        return scores

    def prepare(
        self, current: dict[str, Tensor], batch: TensorDict, all_sum: AllSum, seed: int, metrics: Metrics
    ) -> None:
        """Computes what depends on the whole mini-batch: correction against the current policy, statistics, weights.

        Writes `loss_weights` (B, T), `unit_weights` (B,), with totals over all ranks, and what the plugins prepare.
        The weights count trajectories.

        Args:
            current: outputs of the current policy for this mini-batch, by the names in `current_outputs`, (B, T) each.
            batch: this rank's rows of the mini-batch.
            seed: of this optimizer step.
        """
        with joined_rows(batch, current) as (rows, outputs):
            if self.correction is not None and self.correction.anchor == "rollout":
                self.correction.unsigned(outputs["logprobs"], rows, all_sum, metrics)
                self.correction.signed(outputs["logprobs"], rows, metrics)
            self.policy.prepare(outputs, rows, all_sum, seed)
            self.compute_loss_weights(rows, all_sum)

    @property
    def current_outputs(self) -> tuple[str, ...]:
        """Outputs of the current policy that `prepare` needs of every mini-batch."""
        corrects = self.correction is not None and self.correction.anchor == "rollout"
        return tuple(dict.fromkeys((*(("logprobs",) if corrects else ()), *self.policy.prepares)))

    def compute_loss_weights(self, batch: TensorDict, all_sum: AllSum) -> None:
        """Writes `loss_weights` (B, T) and `unit_weights` (B,) of a mini-batch, with totals over all ranks."""
        keep, rows = counted(batch)
        if self.aggregation is not None:
            batch["loss_weights"] = self.aggregation(keep, batch["group"], rows=rows, all_sum=all_sum)
        batch["unit_weights"] = unit_weights(rows, all_sum=all_sum)

    def update_controllers(self, numbers: dict[str, float], rows: int) -> None:
        """Updates the adaptive coefficients from the finite numbers that were measured over the step."""
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        if "kl/reward" in finite:
            self.reward_control.update(finite["kl/reward"], rows)
        for term in self.policy.terms[1:]:
            if term.plugin.facts.controlled_by in finite:
                term.coef.update(finite[term.plugin.facts.controlled_by], rows)

    def state_dict(self) -> dict[str, Any]:
        """The controllers' coefficients, and what shapings and the advantage remember."""
        terms = {term.name: term.coef.state_dict() for term in self.policy.terms[1:]}
        shaping = {name: remembered.state_dict() for name, remembered in self.shaping_states.items()}
        advantage = {} if self.advantage_state is None else self.advantage_state.state_dict()
        control = self.reward_control.state_dict()
        return {"reward_kl": control, "terms": terms, "shaping": shaping, "advantage": advantage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.reward_control.load_state_dict(state["reward_kl"])
        for term in self.policy.terms[1:]:
            term.coef.load_state_dict(state["terms"][term.name])
        for name, remembered in self.shaping_states.items():
            remembered.load_state_dict(state["shaping"][name])
        if self.advantage_state is not None and (remembered := state.get("advantage")):
            self.advantage_state.load_state_dict(remembered)  # none in a fork of a run with another advantage


def _correction(options: CorrectionOptions, key: str) -> TokenCorrection:
    made: TokenCorrection = import_part(*CORRECTION, key)(options, key)
    return made


def _state(plugin: Plugin, key: str) -> Stateful:
    """What a plugin remembers, before the first step."""
    state = plugin.facts.state()
    if not isinstance(state, Stateful):
        raise ValueError(
            f"{key}: the state of {plugin.title}, a {type(state).__name__}, has no `state_dict` or no "
            "`load_state_dict`, so that no checkpoint would save it; write both"
        )
    return state


def _checked(plugin: Plugin, result: Any, shape: torch.Size) -> Tensor:
    """What a plugin returned, which must be a tensor of this shape."""
    if not isinstance(result, Tensor) or result.shape != shape:
        what = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else spell_type(result)
        raise FunctionError(f"{plugin.title} returned {what}; it must return a tensor of shape {list(shape)}")
    return result


def _term(name: str, node: Any, key: str) -> Term:
    if not isinstance(node, dict) or "coef" not in node:
        raise ValueError(f"{key}.coef is missing: every term has a coefficient; add `coef: <number>`")
    options = {k: v for k, v in node.items() if k != "coef"}
    return Term(name, LOSSES.build(options, key), build_control(node["coef"], f"{key}.coef"))
