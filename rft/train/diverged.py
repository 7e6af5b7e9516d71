"""What the trainer does with a loss, a gradient or a weight that is not finite."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import NonFiniteError
from rft.batch.columns import fields
from rft.batch.media import media_entries
from rft.conditions import ReadIf
from rft.distributed import World
from rft.errors import surviving
from rft.imports import import_part
from rft.logger.log import RunLog
from rft.metrics import Metrics
from rft.ranges import NonNegativeInt, PositiveInt, Seconds

SHOWN = 16  # rows of a column in a message


@dataclass
class FaultOptions:
    """What the run does about faults.

    Attributes:
        nonfinite: `stop` or `skip` an update whose loss or gradient is not finite, or `drop_rows` that are the cause.
        max_skipped: skipped updates of a model in a row; one more stops the run.
        saved_updates: updates of a run, skipped or without some rows, whose rows are saved.
        dead_after_s: see `rft.remote.watchdog.Watchdog`.
        collective_timeout_s: see `rft.remote.watchdog.Watchdog`.
    """

    nonfinite: Literal["stop", "skip", "drop_rows"]
    max_skipped: Annotated[PositiveInt, ReadIf("nonfinite", "skip", "drop_rows")]
    saved_updates: Annotated[NonNegativeInt, ReadIf("nonfinite", "skip", "drop_rows")]
    dead_after_s: Seconds
    collective_timeout_s: Seconds


class NonFinitePolicy:
    """Stops the run at an update that is not finite. `SkipNonFinite` skips it, or takes it again without some rows.

    The model has dropped such an update on all ranks: weights, optimizer and schedule are as they were.

    Args:
        options: what to do.
        run: the run folder; `diverged/` in it gets the rows of each rank.
        world: all processes.
        log: where warnings go.
    """

    def __init__(self, options: FaultOptions, run: Path, world: World, log: RunLog) -> None:
        self._options = options
        self._folder = run / "diverged"
        self._world = world
        self._log = log
        self._in_a_row: dict[str, int] = {}  # skipped updates by the key of the model
        self._not_finite: Counter[str] = Counter()  # updates of this step, by the key of the model

    def state_dict(self) -> dict[str, int]:
        """The skipped updates in a row of each model."""
        return self._in_a_row

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes over what `state_dict` returned."""
        self._in_a_row = dict(state)

    def take(self, step: int, key: str, metrics: Metrics, update: Callable[[list[int]], None]) -> None:
        """Takes an update of a model; one that is not finite leaves nothing in the metrics. A collective.

        Args:
            update: updates the model without the rows of some units, which are the same on every rank.

        Raises:
            ValueError: the update stops the run; names the columns and the file of this rank's rows.
        """
        problem = self._try(metrics, update, [])
        if problem is not None:
            self._not_finite[key] += 1
            self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
            self._stop(step, problem, "")
        self._in_a_row[key] = 0

    def _try(self, metrics: Metrics, update: Callable[[list[int]], None], dropped: list[int]) -> NonFiniteError | None:
        """Takes an update without some units; returns the error of one that is not finite."""
        try:
            with metrics.unless(NonFiniteError):
                update(dropped)
        except NonFiniteError as problem:
            return problem
        return None

    def _stop(self, step: int, problem: NonFiniteError, before: str) -> NoReturn:
        """Saves the rows of an update and raises the error that stops the run.

        Args:
            before: what the message adds about the updates before it.
        """
        path, key = self._save(step, problem), problem.actor
        raise ValueError(
            f"step {step}: the loss or the gradient of the {key} is not finite{before}. "
            f"Not finite on rank {self._world.rank}: {spell_columns(problem)}. "
            f"The rows are saved in {path}; the weights are as they were before the update. Look at the rows, "
            f"lower {key}.optimizer.lr or {key}.optimizer.max_grad_norm, or set faults.nonfinite=skip or "
            "drop_rows, and start again: the run resumes from its last checkpoint"
        ) from problem

    def dropped_units(self, key: str, times: int) -> list[int]:
        """The units that so many updates of a model have dropped in this step, sorted; forgets those of all models."""
        return []

    def record(self, metrics: Metrics) -> None:
        """Adds the skipped updates of a step, those in a row at its end, and the dropped rows and tokens."""
        self._not_finite.clear()

    def _save(self, step: int, problem: NonFiniteError) -> Path:
        number = self._not_finite[problem.actor]
        path = self._folder / f"step_{step:08d}_{problem.actor}_{number}_rank_{self._world.rank}.safetensors"
        with surviving(f"saving the rows in {path}", self._log.warning):
            save_rows(path, problem)
        return path


def nonfinite_policy(options: FaultOptions) -> type[NonFinitePolicy]:
    """The class of the policy that `faults.nonfinite` names."""
    if options.nonfinite == "stop":
        return NonFinitePolicy
    kind: type[NonFinitePolicy] = import_part(
        "rft.train.skipped", "SkipNonFinite", f"faults.nonfinite={options.nonfinite}"
    )
    return kind


def save_rows(path: Path, problem: NonFiniteError) -> None:
    """Writes the columns of a batch to a safetensors file, and what is no tensor to a JSON file beside it.

    A nested column has the name `tokens.input_ids`, and the media of row 3 `media.3.<name>`. The JSON file has the key
    of the model, the columns that are not finite with their rows, and the `fields` of every row if the batch has them.
    A value that JSON cannot hold is written as text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = problem.batch
    plain: TensorDict = batch.exclude("fields", "media").flatten_keys(".")
    tensors = {str(name): column for name, column in plain.items() if isinstance(column, Tensor)}
    for row, entry in enumerate(media_entries(batch)):
        tensors |= {f"media.{row}.{name}": tensor for name, tensor in entry.items()}
    save_file(
        {name: torch.clone(tensor.cpu(), memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        path,
    )
    facts: dict[str, Any] = {"model": problem.actor, "suspects": problem.suspects}
    if "fields" in batch.keys():
        facts["fields"] = fields(batch)
    path.with_suffix(".json").write_text(json.dumps(facts, ensure_ascii=False, default=str), encoding="utf-8")


def nonfinite_weight(step: int, key: str, name: str, last: Path | None) -> ValueError:
    """The error for a weight of a model that is not finite after a step; step 0 is before the first.

    Args:
        key: of the model.
        name: of the weight.
        last: the newest checkpoint, or None.
    """
    if step == 0:
        return ValueError(f"{key}.path: the weight {name} is not finite as it was loaded; choose another model")
    resume = f"the last good one is {last}" if last is not None else "there is none before it"
    return ValueError(
        f"step {step}: the weight {name} of the {key} is not finite after the update. Likely causes: "
        f"{key}.optimizer.lr is too high, {key}.optimizer.max_grad_norm is null or too high, or the loss has no "
        f"bound. No checkpoint of this step is written and nothing is sampled from it; {resume}"
    )


def spell_columns(problem: NonFiniteError) -> str:
    """The columns that are not finite, and their first rows."""
    found = "; ".join(f"column {name!r} in rows {rows[:SHOWN]}" for name, rows in problem.suspects.items())
    return found or "none of its columns (the backward pass itself overflowed, or another rank)"
