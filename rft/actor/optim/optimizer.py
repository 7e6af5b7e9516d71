"""Optimizer and learning-rate schedule of an actor."""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from rft.actor.optim import adamw_8bit, muon
from rft.conditions import ReadIf
from rft.ranges import Fraction, NonNegativeInt, Range

Beta = Annotated[float, Range(low=0, below=1)]
LrFactor = Annotated[float, Range(above=0, high=10_000, hint="frozen stops the training of a part")]
RULES = {"adamw_8bit": adamw_8bit.step, "muon": muon.step}
STEP = inspect.unwrap(torch.optim.AdamW.step)  # without hooks: a plain AdamW of the process adds them to its class


class AdamW(torch.optim.AdamW):
    """Fused AdamW; parameter groups with another `rule` are updated by that one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient. Gradients are freed after another rule has used them."""
        assert closure is None
        for group in self.param_groups:
            if group["rule"] != "adamw":
                updated = [p for p in group["params"] if p.grad is not None]
                states = [self.state[p] for p in updated]
                for state in states:
                    state["step"] = state.get("step", torch.zeros(())) + 1
                RULES[group["rule"]](updated, states, group)
                for parameter in updated:
                    parameter.grad = None
        return STEP(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state. Torch casts its tensors to the dtype of the parameters; codes become uint8 again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["rule"] == "adamw_8bit":
                for state in (self.state[p] for p in group["params"] if p in self.state):
                    state |= {name: state[name].to(torch.uint8) for name in adamw_8bit.CODES}


@dataclass
class Optimizer:
    """Options of an optimizer and its learning-rate schedule.

    Attributes:
        name: `adamw`, `adamw_8bit` (the state of matrices takes two bytes per weight instead of eight), or `muon` (for
            the matrices of the blocks; AdamW updates the other parameters).
        lr: peak learning rate.
        lr_factors: None, or patterns of parameter names, and the factors of `lr` for the parameters that they match;
            the first pattern that matches holds. See `rft.actor.options`.
        betas, eps: those of AdamW.
        weight_decay: for matrices only, not for biases and norms.
        max_grad_norm: the global gradient norm is clipped to this; None: it is not clipped.
        schedule: how the learning rate changes after the warm-up.
        warmup_updates: number of updates in which the learning rate rises linearly from 0.
        final_lr: the last learning rate of `linear` and `cosine`, as a fraction of lr.
    """

    name: Literal["adamw", "adamw_8bit", "muon"]
    lr: Annotated[float, Range(low=0, high=10)]
    lr_factors: dict[str, LrFactor] | None
    betas: tuple[Beta, Beta]
    eps: Annotated[float, Range(low=0, high=1)]
    weight_decay: Annotated[float, Range(low=0, high=100)]
    max_grad_norm: Annotated[float, Range(above=0, hint="null turns clipping off")] | None
    schedule: Literal["constant", "linear", "cosine"]
    warmup_updates: NonNegativeInt
    final_lr: Annotated[Fraction, ReadIf("schedule", "linear", "cosine")]

    @property
    def decays(self) -> bool:
        """True if the learning rate of an update depends on the total number of updates; see `factor`."""
        return self.schedule != "constant"

    def build(
        self, network: nn.Module, blocks: Iterable[nn.Module], updates: int, factors: Mapping[nn.Parameter, float]
    ) -> tuple[AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """The optimizer of the trainable parameters of a network, and its schedule.

        Args:
            blocks: the parts of the network whose matrices Muon updates.
            updates: total number of updates.
            factors: of the learning rates of parameters; the others have the factor 1.
        """
        in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}

        def rule_of(parameter: nn.Parameter) -> str:
            special = {
                "adamw_8bit": adamw_8bit.takes(parameter),
                "muon": id(parameter) in in_blocks and muon.takes(parameter),
            }
            return self.name if special.get(self.name, False) else "adamw"

        groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
        for parameter in network.parameters():
            if parameter.requires_grad:
                decay = self.weight_decay if parameter.dim() >= 2 else 0.0
                groups.setdefault((rule_of(parameter), decay, factors.get(parameter, 1.0)), []).append(parameter)
        optimizer = AdamW(
            [
                {"params": group, "rule": rule, "weight_decay": decay, "lr": factor * self.lr}
                for (rule, decay, factor), group in groups.items()
            ],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: self.factor(update, updates))

    def factor(self, update: int, updates: int) -> float:
        """The learning rate of an update (counted from 0) as a fraction of lr."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        if not self.decays:
            return 1.0
        done = min(1.0, (update - self.warmup_updates) / max(1, updates - self.warmup_updates))
        fall = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_lr + (1.0 - self.final_lr) * fall
