"""What a model minimises: a loss and weighted terms, evaluated on one micro-batch, and one update by it.

The coefficient of a term is fixed, or updated after every step from a number that was measured in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import CONTROLS, AllSum
from rft.algorithm.token_weights.aggregation import row_weights, weigh_logprobs
from rft.algorithm.trajectories import Trajectories, trajectories_of
from rft.batch.columns import over
from rft.errors import FunctionError, spell_type
from rft.registry import Plugin, convert


class Control:
    """A fixed coefficient of a term.

    Attributes:
        coef: as it stands now.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, measured: float, rows: int) -> None:
        """Updates the coefficient from the mean over the step and all ranks, measured on `rows` rows."""

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint: empty, as the coefficient is that of the yaml."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned."""


def build_control(node: Any, key: str) -> Control:
    """The control of a yaml node: a number is a fixed coefficient, a mapping names a control.

    Raises:
        ValueError: names the key of what does not fit; or the control changes, and a checkpoint would not save it.
    """
    if not isinstance(node, Mapping):
        return Control(convert(node, float, key))
    control: Control = CONTROLS.build(node, key)()
    if type(control).update is not Control.update and type(control).state_dict is Control.state_dict:
        raise ValueError(
            f"{key}.name={node['name']}: the control changes in `update` and has no `state_dict`, so that no "
            "checkpoint would save it; write `state_dict` and `load_state_dict`"
        )
    return control


@dataclass
class Term:
    """One summand. `coef` is asked at every step: a controller may move it."""

    name: str
    plugin: Plugin
    coef: Control


class Objective:
    """The sum of a loss and its terms.

    Args:
        terms: the loss, then what is added to it.
        mask: which tokens pass the loss's gradient (the terms' gradients pass everywhere); None for all.
        corrected: the loss, but none of the terms, is multiplied by the column `correction_weights` (B, T), or by
            its geometric mean over a row.

    Attributes:
        outputs: columns that the forward must compute.
        reads: columns that the batch must hold.
        prepares: columns of a forward that `prepare` needs over the whole mini-batch; empty if no function has one.
    """

    def __init__(self, terms: list[Term], mask: Plugin | None = None, corrected: bool = False) -> None:
        self.terms = terms
        self.mask = mask
        self.corrected = corrected
        self.outputs = tuple(dict.fromkeys(name for term in terms for name in term.plugin.facts.outputs))
        early = [term.plugin for term in terms if term.plugin.facts.prepare is not None]
        early += [] if mask is None else [mask]
        reading = [*(term.plugin for term in terms), *early]
        self.reads = tuple(dict.fromkeys(name for plugin in reading for name in plugin.facts.reads))
        self.prepares = tuple(dict.fromkeys(name for plugin in early for name in plugin.facts.outputs))

    def prepare(self, outputs: dict[str, Tensor], batch: TensorDict, all_sum: AllSum, seed: int) -> None:
        """Writes the columns that depend on the whole mini-batch of all ranks.

        Args:
            outputs: the columns `prepares` of the current policy, (B, T) each.
            batch: this rank's rows of the mini-batch.
            seed: of this optimizer step, for random choices.
        """
        for term in self.terms:
            if term.plugin.facts.prepare is not None:
                given, rows = weigh_logprobs(term.plugin, outputs, batch)
                columns = term.plugin.call("prepare", *given, rows, all_sum=all_sum, seed=seed)
                for name, column in columns.items():
                    batch[name] = column
        if self.mask is not None:
            given = [outputs[name] for name in self.mask.facts.outputs]
            batch["gradient_mask"] = self.mask(*given, batch, all_sum=all_sum, seed=seed)

    def evaluate(
        self, term: Term, outputs: dict[str, Tensor], batch: TensorDict, trajectories: Trajectories | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Value and weight of a term, (B, T) or (B,) as its unit says, and its statistics.

        The term is evaluated on whole trajectories; where one has several rows, the value of a unit stands in all of
        them and weighs in one.

        Args:
            trajectories: of the batch; None where each of them is one row.

        Raises:
            ValueError: a function returned a reduced value, or one of another shape.
        """
        names = term.plugin.facts.outputs
        if trajectories is not None:
            outputs, batch = {name: trajectories.join(outputs[name]) for name in names}, trajectories.rows
        given, rows = weigh_logprobs(term.plugin, outputs, batch)
        main = term is self.terms[0]
        if main and self.mask is not None:
            given = [torch.where(over(batch["gradient_mask"], column), column, column.detach()) for column in given]
        result = term.plugin(*given, rows)
        unit = term.plugin.facts.unit
        weights = batch["loss_weights"] if unit == "token" else batch["unit_weights"]
        if not (isinstance(result, tuple) and [type(part) for part in result] == [Tensor, dict]):
            raise FunctionError(
                f"{term.plugin.title} returned {spell_type(result)}; it must return (tensor, statistics)"
            )
        loss, statistics = result
        if loss.shape != weights.shape:
            each = "token" if unit == "token" else "row"
            raise FunctionError(
                f"the loss {term.plugin.name!r} returned a value of shape {list(loss.shape)}; with unit={unit!r} it "
                f"must return {list(weights.shape)}: one number per {each}, not reduced"
            )
        if main and self.corrected:
            weights = weights * (batch["correction_weights"] if unit == "token" else row_weights(batch))
        if trajectories is not None:
            loss, weights = trajectories.split(loss), trajectories.split(weights)
            statistics = {name: trajectories.split(number) for name, number in statistics.items()}
            if unit != "token":
                weights = torch.where(trajectories.is_last, weights, 0.0)
        return loss, weights, statistics

    def __call__(
        self, outputs: dict[str, Tensor], batch: TensorDict, trajectories: Trajectories | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Evaluates every term on a micro-batch.

        Args:
            outputs: the columns of the forward, (B, T) each.
            batch: the micro-batch, with `loss_weights` (B, T) that sum to what the aggregation says over the step.
            trajectories: of the micro-batch; None where each of them is one row.

        Returns:
            The scalar to differentiate, each term's share of `loss/<term>` (detached scalars that add up over
            micro-batches and ranks), and the statistics of every term, unreduced.
        """
        total = torch.zeros((), device=batch["unit_weights"].device)
        shares: dict[str, Tensor] = {}
        statistics: dict[str, Tensor] = {}
        for term in self.terms:
            loss, weights, numbers = self.evaluate(term, outputs, batch, trajectories)
            share = (loss * weights).where(weights != 0, 0.0).sum()
            total = total + term.coef.coef * share
            shares[f"loss/{term.name}"] = share.detach()
            statistics |= numbers
        return total, shares, statistics

    def spoilt_rows(self, outputs: dict[str, Tensor], batch: TensorDict) -> dict[str, list[int]]:
        """Rows whose loss, or whose gradient of it, is not finite, by the name of the term."""
        spoilt: dict[str, list[int]] = {}
        trajectories = trajectories_of(batch)
        for term in self.terms:
            leaves = {name: outputs[name].clone().requires_grad_() for name in term.plugin.facts.outputs}
            with torch.enable_grad():
                loss, weights, _ = self.evaluate(term, leaves, batch, trajectories)
                loss = loss.where(weights != 0, 0.0)
                gradients = torch.autograd.grad(loss.sum(), list(leaves.values()))
            values = {f"loss/{term.name}": [loss.detach()], f"gradient of loss/{term.name}": gradients}
            for name, parts in values.items():
                finite = [part.isfinite().reshape(len(batch), -1).all(1) for part in parts]  # (B,) each
                if rows := (~torch.stack(finite).all(0)).nonzero()[:, 0].tolist():
                    spoilt[name] = rows
        return spoilt


@dataclass(frozen=True)
class Update:
    """One optimizer step of one model.

    Attributes:
        objective: what it minimises.
        watch: outputs whose mean over trained tokens is logged although no loss reads them.
        log_mismatch: the model logs how far the current policy is from the policy that sampled.
    """

    objective: Objective
    watch: tuple[str, ...] = ()
    log_mismatch: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Columns that the forward must compute."""
        compared = ("logprobs",) if self.log_mismatch else ()
        return tuple(dict.fromkeys((*self.objective.outputs, *self.watch, *compared)))
