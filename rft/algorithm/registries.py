"""The registries of the math: which functions there are, and which facts each states about itself.

Advantage:   f(scores (B,), rewards (B, T), batch, *, [all_sum,] options) -> {column: (B, T)}, zero where `keep` is not.
Loss:        f(output (B, T), ..., batch, *, options) -> (value per unit, {statistic: value per unit}).
Aggregation: f(keep (B, T), group (B,), *, [all_sum,] options) -> weight of every token (B, T).
Shaping:     f(scores (B,), batch, *, options) -> scores (B,).
KL control:  f(*, options) -> a `KLControl`.

`all_sum` sums a tensor over all ranks; it is how a function gets statistics of the whole step without knowing what a
rank is. Trained tokens are `batch["keep"]`.
"""

from collections.abc import Callable

from torch import Tensor

from rft.registry import Registry

AllSum = Callable[[Tensor], Tensor]
Unreduced = tuple[Tensor, dict[str, Tensor]]  # a loss per unit, and statistics of the same shape

ADVANTAGES = Registry("advantage", supplied=("all_sum",), reads=(), writes=("advantages",), group_baseline=False)
LOSSES = Registry("loss", reads=(), outputs=("logprobs",), head="lm", unit="token")
AGGREGATIONS = Registry("aggregation", supplied=("all_sum",))
SHAPINGS = Registry("shaping", reads=())
KL_CONTROLS = Registry("KL control")
