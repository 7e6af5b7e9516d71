"""Whether the gradient of an algorithm is right for trajectories of several turns, in whatever rows they are written.

A policy of dialogues is enumerated: a turn of one token, which may end the dialogue; a random answer of an environment;
a turn of one or two tokens. One batch has all groups of two trajectories, weighted with their probabilities. It is
written in one of `LAYOUTS`, and the functions of an algorithm compute the gradient as they do in a step. A statistic
over the batch counts every group once, whatever its probability.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from tensordict import TensorDict

from rft.algorithm.algorithm import Algorithm
from rft.algorithm.certificate.measure import OBJECTIVES, Measured, compare
from rft.algorithm.certificate.policy import Prompt, TinyPolicy
from rft.algorithm.certificate.sample import alone, differentiated
from rft.algorithm.objective import Objective
from rft.algorithm.trajectories import trajectories_of
from rft.metrics import Metrics

DIALOGUE = Prompt(positions=4, given=1)  # 29 trajectories
TRAJECTORIES = 2  # of a group
TOLERANCE = 1e-6  # relative: advantages and weights are float32
WRITTEN = ("advantages", "returns", "loss_mask", "group", "unit", "truncated", "scores")  # not columns of the policy

# Of each row of a trajectory: the tokens of the whole dialogue that it holds, in order, and the turn that trains in it,
# None for both. The whole dialogue is: prompt, first turn, answer of the environment, two tokens of the second turn.
Layout = tuple[tuple[tuple[int, ...], int | None], ...]
LAYOUTS: dict[str, Layout] = {
    "one row": (((0, 1, 2, 3, 4), None),),
    "a row per turn": (((0, 1), 1), ((0, 1, 2, 3, 4), 2)),
    "fork": (((0, 1, 2, 3, 4), 1), ((0, 0, 1, 2, 2, 3, 4), 2)),  # the context of the second turn is rendered again
    "compaction": (((0, 1), 1), ((2, 3, 4), 2)),  # its context is shortened
}


def keep_trajectories(rows: TensorDict) -> None:
    """Leaves the rows as a source writes them."""


def separate_rows(rows: TensorDict) -> None:
    """Makes a trajectory of every row: the score of a dialogue of two rows counts twice."""
    rows["trajectory"] = rows["unit"] = torch.arange(len(rows))


def measure_dialogues(
    algorithm: Algorithm, layout: Layout, change: Callable[[TensorDict], None] = keep_trajectories
) -> tuple[Measured, torch.Tensor]:
    """The gradient of an algorithm's loss on dialogues, against that of the expected score.

    Args:
        layout: the rows of a trajectory.
        change: of the rows before the step; `chance` (B,) weighs each in the loss.

    Returns:
        The relation, and the ascent direction by the logits.
    """
    algorithm = deepcopy(algorithm)  # a step changes what it remembers
    policy = TinyPolicy([DIALOGUE], reads=sorted(algorithm.reads().difference(WRITTEN)))
    logits = policy.logits.clone().requires_grad_()
    answers, batch, chance = next(policy.batches(TRAJECTORIES, together=False))
    batch["truncated"] = torch.zeros(len(batch), dtype=torch.bool)
    groups = len(batch) // TRAJECTORIES  # by which the weights of tokens are smaller than those of one group
    batch["trajectory"], batch["chance"] = batch["unit"], groups * chance
    outputs = {name: column[answers] for name, column in policy.forward(logits).items()}
    rows, outputs = write(batch, outputs, layout)
    change(rows)

    metrics = Metrics()
    algorithm.build_loss_mask(rows)
    algorithm.estimate_advantages(rows, alone, metrics)
    algorithm.prepare({name: column.detach() for name, column in outputs.items()}, rows, alone, 0, metrics)
    for name in {"loss_weights", "unit_weights"} & set(rows.keys()):
        rows[name] = rows[name] * rows["chance"].view(-1, *[1] * (rows[name].dim() - 1))
    objective = Objective(algorithm.policy.terms[:1], algorithm.policy.mask, algorithm.policy.corrected)
    loss, _, _ = objective(outputs, rows, trajectories_of(rows))
    gradient = differentiated(-loss, {"logits": logits})["logits"]

    logits = policy.logits.clone().requires_grad_()
    wanted = differentiated(OBJECTIVES["reward"](policy, logits, TRAJECTORIES, {}), {"logits": logits})["logits"]
    return compare(gradient, wanted, "reward", TOLERANCE), gradient


def same_gradient(gradient: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two gradients differ by a relative 1e-10 at most."""
    return bool((gradient - other).norm() <= 1e-10 * other.norm())


def write(
    batch: TensorDict, outputs: dict[str, torch.Tensor], layout: Layout
) -> tuple[TensorDict, dict[str, torch.Tensor]]:
    """The rows of trajectories in an order that mixes them, and the outputs of a model for them.

    Args:
        batch: N trajectories, each in one row; `loss_mask` is what trains in some row.
        outputs: of a model for the trajectories.
    """
    width, parts = max(len(tokens) for tokens, _ in layout), []
    whole = batch.clone(recurse=False).update({f"output/{name}": column for name, column in outputs.items()})
    for tokens, turn in layout:
        places = torch.tensor([*tokens, *[0] * (width - len(tokens))])
        part = whole.apply(lambda column, places=places: column[:, places] if column.dim() > 1 else column)
        trains = part["loss_mask"] & (torch.arange(width) < len(tokens))
        part["response_mask"] = trains if turn is None else trains & (part["turn"] == turn)
        parts.append(part)
    rows = TensorDict.cat(parts)
    rows = rows[rows["response_mask"].any(1)]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    written = {name: rows[f"output/{name}"] for name in outputs}
    return rows.exclude("loss_mask", *(f"output/{name}" for name in outputs)), written
