"""Pure math on columns: no I/O, no model, no process group. Importing this package registers every plugin in it.

These are the registries of the functions of an algorithm, and the facts that each function declares.

Advantage:     f(scores (B,), rewards (B, T), batch, *, [all_sum, term_weights, state,] options) -> {column: (B, T)},
               zero outside `loss_mask`.
Loss:          f(output (B, T), ..., batch, *, options) -> (value per unit, {statistic: value per unit}).
Aggregation:   f(keep (B, T), group (B,), *, [rows (B,), all_sum,] options) -> weight of every token (B, T).
Shaping:       f(scores (B,), batch, *, [all_sum, state,] options) -> scores (B,); the rows are those that count.
Gradient mask: f(output (B, T), ..., batch, *, [all_sum, seed,] options) -> (B, T) bool, tokens that pass a gradient.
Control:       f(*, options) -> a `Control`.
Selection:     f(batch, *, [all_rows, seed,] options) -> (how often a row trains (B,) int64 or None, {column: (B,)}).

A loss that is a geometric mean over the tokens of a row states `geometric_mean`: a correction then weighs it with the
geometric mean of the weights of the row's tokens.

The `statistics` that a loss states are those that the evaluation of held-out texts reports.

`all_sum` sums a tensor over all ranks, `all_rows` returns an object of every rank in a list: functions get statistics
of the whole step through them and need no process group. Trained tokens are `batch["loss_mask"]`.

A loss that needs statistics of the mini-batch states `prepare`, a function of the same outputs (without a gradient)
and the whole mini-batch: f(output (B, T), ..., batch, *, [all_sum, seed,] [options of the loss]) -> {column: (B, T) or
(B,)}. The columns are in the batch when the loss is called on a part of it.

A shaping or an advantage that remembers earlier steps states `state`, a class without arguments. The algorithm keeps
one object of it, passes it as `state` in every step, logs its `numbers()` and saves it in the checkpoint by
`state_dict` and `load_state_dict`. Such a function changes it alike on every rank.

Every function gets whole trajectories: where rows are parts of one (`rft.algorithm.trajectories`), they are joined.

A loss names in `idle_on_policy` its options (a term also `coef`) that do not change the gradient where the old columns,
`old_logprobs` or `values`, are those of the weights that train: the bounds of a clip, for example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rft.imports import import_all
from rft.registry import Registry


@dataclass(frozen=True)
class Gradient:
    """The relation of a plugin's gradient to that of an objective, where current, old and rollout policy are equal.

    `rft.algorithm.certificate` checks it by enumerating a tiny policy, in the tests and in `mode=verify`.

    Attributes:
        relation: `exact`: the same vector. `scaled`: a positive constant times it. `near`: an angle apart from it.
            `none`: zero, whatever the target.
        target: the objective that is maximised, by its name in `rft.algorithm.certificate.measure`. For an advantage or
            an aggregation the relation holds in expectation. For a loss it holds at every token of given rows if the
            target is one of the `SURROGATES` there, and in expectation otherwise.
        factor: of `scaled`, where it is known: the constant for groups of n rows.
        cosine: of `near`: of the angle, to three digits, on the enumerated policy and with the options of the yaml.
        note: half a sentence of explanation for the reader.
    """

    relation: Literal["exact", "scaled", "near", "none"]
    target: str = "reward"
    factor: Callable[[int], float] | None = None
    cosine: float | None = None
    note: str = ""


AllSum = Callable[[Tensor], Tensor]
AllRows = Callable[[Any], list[Any]]
Unreduced = tuple[Tensor, dict[str, Tensor]]  # a loss per unit, and statistics of the same shape

ADVANTAGES = Registry(
    "advantage",
    supplied=("all_sum", "term_weights", "state"),
    functions=("state",),
    reads=(),
    writes=("advantages",),
    group_baseline=False,
    raw=False,
    state=None,
    gradient=None,
)
LOSSES = Registry(
    "loss",
    functions=("prepare",),
    reads=(),
    outputs=("logprobs",),
    head="lm",
    unit="token",
    geometric_mean=False,
    prepare=None,
    controlled_by=None,
    idle_on_policy=(),
    statistics=(),
    gradient=None,
)
AGGREGATIONS = Registry("aggregation", supplied=("rows", "all_sum"), gradient=None)
SHAPINGS = Registry("shaping", supplied=("all_sum", "state"), functions=("state",), reads=(), state=None)
GRADIENT_MASKS = Registry("gradient mask", supplied=("all_sum", "seed"), reads=(), outputs=("logprobs",), gradient=None)
CONTROLS = Registry("control")
SELECTIONS = Registry(
    "selection",
    supplied=("all_rows", "seed"),
    masks=False,
    writes=(),
    groups=False,
    pairs=False,
    resamples=False,
)

for folder in ("advantage", "loss", "scores", "token_weights"):
    import_all(f"{__name__}.{folder}")
