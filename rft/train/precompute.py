"""Columns of a frozen model that are computed before training, once for every row."""

import copy
import time
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import ColumnModel
from rft.actor.reference import PrecomputedReference, row_keys
from rft.algorithm.step import StepContext
from rft.metrics import Metrics
from rft.train.stage import Stage


def precompute_columns(
    model: ColumnModel,
    stage: Stage,
    done: int | None,
    held_out: Iterable[TensorDict],
    step_context: Callable[[Stage, TensorDict, Metrics], StepContext],
    say: Callable[[str], None],
) -> None:
    """Computes the column of a precomputed model for every row that a stage is going to draw, and for every held-out
    row, once. A collective.

    A model of its own is loaded before the run begins and freed before there is an optimizer; a copy of the policy is
    precomputed when its stage begins.

    Args:
        model: nothing is done unless it is precomputed and the algorithm reads its column.
        done: steps of the stage that are done, or None before the run begins.
        held_out: this rank's batches of held-out texts.
        step_context: `Trainer.step_context`.
        say: prints a message for the user.

    Raises:
        ValueError: the file is gone or damaged, and the policy that it describes has been trained since.
    """
    if not isinstance(model, PrecomputedReference) or model.column not in stage.algorithm.reads():
        return
    if model.complete or (done is None and model.copied):
        return
    if done:
        raise ValueError(
            f"{model.key}.precompute: {model.file} {model.problem}, and the policy has been trained since it was "
            "written; put the file back, or start again with resume=never"
        )
    if model.file.exists():
        say(f"{model.file} {model.problem}; its log-probabilities are computed again")
    started, gather = time.perf_counter(), model.world.gather
    place = copy.deepcopy(stage.source.state_dict())
    known: dict[bytes, Tensor] = {}
    for batch in chain(held_out, (stage.source.next(Metrics()) for _ in range(stage.steps))):
        stage.algorithm.build_loss_mask(batch)
        new = batch[torch.tensor([key not in known for key in row_keys(batch)])]
        if any(gather(len(new) > 0)):
            found = step_context(stage, batch, Metrics()).compute(model.key, new, ("logprobs",))["logprobs"]
            local_rows = {key: row[keep] for key, row, keep in zip(row_keys(new), found, new["loss_mask"], strict=True)}
            for rank_rows in gather(local_rows):
                known |= rank_rows
    stage.source.load_state_dict(place)
    model.write(known)
    say(f"the {model.key}'s log-probabilities of {len(known):,} rows took {time.perf_counter() - started:.0f} s")
