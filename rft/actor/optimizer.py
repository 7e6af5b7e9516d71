"""Optimizer and learning-rate schedule of an actor."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass
class Optimizer:
    """Options of AdamW and its schedule; the numbers stand in the yaml of the actor.

    Attributes:
        lr: peak learning rate.
        betas, eps: of AdamW.
        weight_decay: on matrices only, not on biases and norms.
        max_grad_norm: the global gradient norm is clipped to this.
        schedule: what the rate does after the warm-up.
        warmup_updates: optimizer updates of a linear rise from 0.
        final_lr: where linear and cosine end, as a fraction of lr.
    """

    lr: float
    betas: list[float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_updates: int
    final_lr: float

    def build(
        self, parameters: Iterable[nn.Parameter], updates: int
    ) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """AdamW and its schedule over a known number of updates."""
        trained = [p for p in parameters if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (self.betas[0], self.betas[1])
        adamw = torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, fused=True)
        return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda update: self.factor(update, updates))

    def factor(self, update: int, updates: int) -> float:
        """The learning rate of an update (counted from 0) as a fraction of lr."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (update - self.warmup_updates) / max(1, updates - self.warmup_updates))
        fall = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_lr + (1.0 - self.final_lr) * fall
