"""What the trainer does with a loss, a gradient or a weight that is not finite."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from rft.actor.base import NonFiniteError
from rft.algorithm.roles import POLICY
from rft.batch.columns import fields
from rft.batch.media import media_entries
from rft.conditions import ReadIf
from rft.distributed import World
from rft.logger.log import RunLog
from rft.metrics import Metrics
from rft.ranges import NonNegativeInt, PositiveInt, Seconds

SHOWN = 16  # rows of a column in a message


@dataclass
class FaultOptions:
    """What the run does about faults.

    Attributes:
        nonfinite: `stop` or `skip` an update whose loss or gradient is not finite.
        max_skipped: skipped updates of a model in a row; one more stops the run.
        saved_updates: skipped updates of a run whose rows are saved.
        dead_after_s: see `rft.remote.watchdog.Watchdog`.
        collective_timeout_s: see `rft.remote.watchdog.Watchdog`.
    """

    nonfinite: Literal["stop", "skip"]
    max_skipped: Annotated[PositiveInt, ReadIf("nonfinite", "skip")]
    saved_updates: Annotated[NonNegativeInt, ReadIf("nonfinite", "skip")]
    dead_after_s: Seconds
    collective_timeout_s: Seconds


class NonFinitePolicy:
    """Stops the run at an update that is not finite, or skips the update.

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
        self._in_step: Counter[str] = Counter()

    def state_dict(self) -> dict[str, int]:
        """The skipped updates in a row of each model."""
        return self._in_a_row

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes over what `state_dict` returned."""
        self._in_a_row = dict(state)

    @contextmanager
    def around_update(self, step: int, key: str, metrics: Metrics) -> Iterator[None]:
        """Around an update of a model: one that is not finite stops the run, or leaves nothing in the metrics.

        Raises:
            ValueError: the update stops the run; names the columns and the file of this rank's rows.
        """
        try:
            with metrics.unless(NonFiniteError):
                yield
        except NonFiniteError as problem:
            self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
            self._in_step[key] += 1
            self._handle(step, problem)
        else:
            self._in_a_row[key] = 0

    def _handle(self, step: int, problem: NonFiniteError) -> None:
        skips, rank = self._options.nonfinite == "skip", self._world.rank
        if not skips or self._in_a_row[problem.actor] > self._options.max_skipped:
            skipped = f"; faults.max_skipped={self._options.max_skipped} updates before it are skipped" if skips else ""
            raise stop_error(step, problem, rank, self._save(step, problem), skipped) from problem
        saved = len(list(self._folder.glob(f"*_rank_{rank}.safetensors")))
        if saved < self._options.saved_updates:
            path = self._save(step, problem)
            self._log.warning(
                f"step {step}: an update of the {problem.actor} is skipped, because its loss or gradient is not "
                f"finite. Not finite on rank {rank}: {_spell(problem)}. The rows are saved in {path}"
            )

    def record(self, metrics: Metrics) -> None:
        """Adds the skipped updates of a step, and those in a row at its end."""
        if self._options.nonfinite == "skip":
            for key, number in self._in_a_row.items():  # the same on every rank
                metrics.largest(_name(key, "skipped_updates"), self._in_step[key])
                metrics.largest(_name(key, "skipped_in_a_row"), number)
        self._in_step.clear()

    def _save(self, step: int, problem: NonFiniteError) -> Path:
        number = self._in_step[problem.actor]
        path = self._folder / f"step_{step:08d}_{problem.actor}_{number}_rank_{self._world.rank}.safetensors"
        save_rows(path, problem)
        return path


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


def stop_error(step: int, problem: NonFiniteError, rank: int, path: Path, skipped: str) -> ValueError:
    """The error that stops a run at an update that is not finite.

    Args:
        path: of the rows of this rank.
        skipped: said behind the first sentence of a run that has skipped updates before it; else empty.
    """
    return ValueError(
        f"step {step}: the loss or the gradient of the {problem.actor} is not finite{skipped}. "
        f"Not finite on rank {rank}: {_spell(problem)}. "
        f"The rows are saved in {path}; the weights are as they were before the update. Look at the rows, lower "
        f"{problem.actor}.optimizer.lr or {problem.actor}.optimizer.max_grad_norm, or set faults.nonfinite=skip, and "
        "start again: the run resumes from its last checkpoint"
    )


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


def _spell(problem: NonFiniteError) -> str:
    found = "; ".join(f"column {name!r} in rows {rows[:SHOWN]}" for name, rows in problem.suspects.items())
    return found or "none of its columns (the backward pass itself overflowed, or another rank)"


def _name(key: str, name: str) -> str:
    return f"faults/{name}" if key == POLICY else f"{key}/faults/{name}"
