"""What an actor minimises: a loss and weighted terms, evaluated on one micro-batch."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.kl import KLControl
from rft.registry import Plugin


@dataclass
class Term:
    """One summand. `coef` is asked at every step: a controller may move it."""

    name: str
    plugin: Plugin
    coef: KLControl


class Objective:
    """The sum of a loss and its terms.

    Attributes:
        outputs: columns that the forward must compute.
        reads: columns that the batch must hold.
    """

    def __init__(self, terms: list[Term]) -> None:
        self.terms = terms
        self.outputs = tuple(dict.fromkeys(name for term in terms for name in term.plugin.facts.outputs))
        self.reads = tuple(dict.fromkeys(name for term in terms for name in term.plugin.facts.reads))

    def __call__(
        self, outputs: dict[str, Tensor], batch: TensorDict
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Evaluates every term on a micro-batch.

        Args:
            outputs: the columns of the forward, (B, T) each.
            batch: the micro-batch, with `loss_weights` (B, T) that sum to what the aggregation says over the step.

        Returns:
            The scalar to differentiate, each term's share of `loss/<term>` (detached scalars that add up over
            micro-batches and ranks), and the statistics of every term, unreduced.
        """
        total = torch.zeros((), device=batch["loss_weights"].device)
        shares: dict[str, Tensor] = {}
        statistics: dict[str, Tensor] = {}
        for term in self.terms:
            loss, numbers = term.plugin(*[outputs[name] for name in term.plugin.facts.outputs], batch)
            weights = batch["loss_weights"] if term.plugin.facts.unit == "token" else batch["unit_weights"]
            share = (loss * weights).where(weights != 0, 0.0).sum()
            total = total + term.coef.coef * share
            shares[f"loss/{term.name}"] = share.detach()
            statistics |= numbers
        return total, shares, statistics

    def spoilt_rows(self, outputs: dict[str, Tensor], batch: TensorDict) -> dict[str, list[int]]:
        """Rows whose loss, or whose gradient of it, is not finite, by the name of the term. All columns are finite."""
        found: dict[str, list[int]] = {}
        for term in self.terms:
            given = [outputs[name].clone().requires_grad_() for name in term.plugin.facts.outputs]
            with torch.enable_grad():
                loss, _ = term.plugin(*given, batch)
                weights = batch["loss_weights"] if term.plugin.facts.unit == "token" else batch["unit_weights"]
                loss = loss.where(weights != 0, 0.0)
                gradients = torch.autograd.grad(loss.sum(), given)
            values = {f"loss/{term.name}": [loss.detach()], f"gradient of loss/{term.name}": gradients}
            for name, parts in values.items():
                finite = [part.isfinite().reshape(len(batch), -1).all(1) for part in parts]  # (B,) each
                if rows := (~torch.stack(finite).all(0)).nonzero()[:, 0].tolist():
                    found[name] = rows
        return found
