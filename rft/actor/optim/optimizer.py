"""Optimizer and learning-rate schedule of an actor."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from rft.conditions import ReadIf
from rft.imports import import_part
from rft.ranges import Fraction, NonNegativeInt, Range

Beta = Annotated[float, Range(low=0, below=1)]
LrFactor = Annotated[float, Range(above=0, high=10_000, hint="frozen stops the training of a part")]
STEP = inspect.unwrap(torch.optim.AdamW.step)  # without hooks: a plain AdamW of the process adds them to its class


@dataclass(frozen=True)
class Rule:
    """A rule that updates some parameters in the place of AdamW: the variable `RULE` of the module with its name.

    Attributes:
        takes: whether it updates a parameter.
        step: updates parameters that have a gradient; takes them, their states and their parameter group.
        of_blocks: it updates parameters of the blocks alone.
        codes: the names of those tensors of a state that are uint8.
    """

    takes: Callable[[nn.Parameter], bool]
    step: Callable[[list[nn.Parameter], list[dict[str, Any]], dict[str, Any]], None]
    of_blocks: bool = False
    codes: tuple[str, ...] = ()


class AdamW(torch.optim.AdamW):
    """Fused AdamW; parameter groups with another `rule` are updated by that one.

    Args:
        groups, options: of torch's AdamW.
        rule: the other one, if there is one.
    """

    def __init__(self, groups: list[dict[str, Any]], rule: Rule | None, **options: Any) -> None:
        self.rule = rule
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient. Gradients are freed after another rule has used them."""
        assert closure is None
        for group in self.param_groups:
            if self.rule is not None and group["rule"] != "adamw":
                updated = [p for p in group["params"] if p.grad is not None]
                states = [self.state[p] for p in updated]
                for state in states:
                    state["step"] = state.get("step", torch.zeros(())) + 1
                self.rule.step(updated, states, group)
                for parameter in updated:
                    parameter.grad = None
        return STEP(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state. Torch casts its tensors to the dtype of the parameters; codes become uint8 again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if self.rule is not None and group["rule"] != "adamw":
                for state in (self.state[p] for p in group["params"] if p in self.state):
                    state |= {name: state[name].to(torch.uint8) for name in self.rule.codes}


@dataclass
class Optimizer:
    """Options of an optimizer and its learning-rate schedule.

    Attributes:
        name: `adamw`, `adamw_8bit` (the state of matrices takes two bytes per weight instead of eight), or `muon` (for
            the matrices of the blocks; AdamW updates the other parameters).
        lr: peak learning rate.
        lr_factors: None, or patterns of parameter names, and the factors of `lr` for the parameters that they match;
            the first pattern that matches holds. See `rft.actor.patterns`.
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
        rule: Rule | None = None
        if self.name != "adamw":
            rule = import_part(f"{__package__}.{self.name}", "RULE", f"optimizer.name={self.name}")

        def rule_of(parameter: nn.Parameter) -> str:
            if rule is None or (rule.of_blocks and id(parameter) not in in_blocks) or not rule.takes(parameter):
                return "adamw"
            return self.name

        groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
        for parameter in network.parameters():
            if parameter.requires_grad:
                decay = self.weight_decay if parameter.dim() >= 2 else 0.0
                groups.setdefault((rule_of(parameter), decay, factors.get(parameter, 1.0)), []).append(parameter)
        optimizer = AdamW(
            [
                {"params": group, "rule": name, "weight_decay": decay, "lr": factor * self.lr}
                for (name, decay, factor), group in groups.items()
            ],
            rule,
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
