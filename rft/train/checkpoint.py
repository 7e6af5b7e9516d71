"""Checkpoints: what a run writes so that it can be resumed, and so that its model can be used."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rft.actor.base import NonFiniteError
from rft.distributed import World
from rft.logger.history import rank_key
from rft.ranges import NonNegativeInt, PositiveInt


@dataclass
class CheckpointOptions:
    """When to save and what to keep.

    Attributes:
        every: steps between checkpoints; 0 for the ends of stages alone.
        keep_last: number of newest checkpoints that stay.
        keep_best: number of best checkpoints, by the watched metric, that stay besides.
    """

    every: NonNegativeInt
    keep_last: PositiveInt
    keep_best: NonNegativeInt


class Checkpoints:
    """The folder `checkpoints/` of a run.

    A checkpoint is a folder `step_00000010` with the policy as a Hugging Face model in `actor/`, everything needed to
    resume in `state.pt`, and the watched metric in `metric.json`. `latest` links to the newest. A folder appears
    under its name only when it is complete.

    Args:
        run: the run folder.
        options: when to save and what to keep.
        world: rank zero writes.
        watched: the metric that makes a checkpoint the best; of a loss or a perplexity the lowest value is.
        source: the checkpoint that is read until the run has one of its own; None for no other.
    """

    def __init__(
        self, run: Path, options: CheckpointOptions, world: World, watched: str, source: Path | None = None
    ) -> None:
        self.run = run
        self.folder = run / "checkpoints"
        self._options = options
        self._world = world
        self._watched = watched
        self._source = source

    def due(self, step: int) -> bool:
        """True where a checkpoint is to be written after this step."""
        return self._options.every > 0 and step % self._options.every == 0

    def latest(self) -> Path | None:
        """The checkpoint that `latest` links to; without the link the newest one; else `source`."""
        link = self.folder / "latest"
        return link.resolve() if link.exists() else max(self.folder.glob("step_*"), default=self._source)

    def read(self) -> dict[str, Any] | None:
        """The newest state, or None where there is none.

        Raises:
            ValueError: it is missing or damaged; names the file.
        """
        latest = self.latest()
        if latest is None:
            return None
        if self._world.rank == 0:
            self.prune()  # the process before may have been killed before it had
        file = latest / "state.pt"
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"{file} cannot be read ({(str(error) or 'it ends early').splitlines()[0]}); restore it, let "
                f"{self.folder / 'latest'} link to an older checkpoint, or set resume=never to start again"
            ) from error
        return state

    def write(self, step: int, state: dict[str, Any], save_model: Callable[[Path], None], metric: float | None) -> None:
        """Writes a checkpoint and removes those that are not kept. A collective (`save_model` gathers weights)."""
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        if self._world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        save_model(partial / "actor")
        if self._world.rank != 0:
            return
        torch.save(state, partial / "state.pt")
        (partial / "metric.json").write_text(json.dumps(metric))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        link = self.folder / ".latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, self.folder / "latest")
        self.prune()

    def prune(self) -> None:
        """Removes the checkpoints that are not kept."""
        steps = sorted(self.folder.glob("step_*"))
        metrics = {path: json.loads((path / "metric.json").read_text()) for path in steps}
        ranked = {path: rank_key(self._watched, value) for path, value in metrics.items() if value is not None}
        measured = sorted(ranked, key=lambda path: (ranked[path], path.name))
        best = measured[len(measured) - self._options.keep_best :] if self._options.keep_best else []
        newest = steps[-max(1, self._options.keep_last) :]
        for path in steps:
            if path not in best and path not in newest:
                shutil.rmtree(path)

    def nonfinite_weight(self, step: int, key: str, name: str) -> ValueError:
        """The error for a weight of a model that is not finite after a step; step 0 is before the first."""
        if step == 0:
            return ValueError(f"{key}.path: the weight {name} is not finite as it was loaded; choose another model")
        last = self.latest()
        resume = f"the last good one is {last}" if last is not None else "there is none before it"
        return ValueError(
            f"step {step}: the weight {name} of the {key} is not finite after the update. Likely causes: "
            f"{key}.optimizer.lr is too high, {key}.optimizer.max_grad_norm is null or too high, or the loss has no "
            f"bound. No checkpoint of this step is written and nothing is sampled from it; {resume}"
        )

    def dump_nonfinite(self, step: int, problem: NonFiniteError) -> ValueError:
        """Saves the rows of a step whose loss or gradient is not finite. Returns the error that says where they are."""
        folder = self.run / "diverged"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step:08d}_rank_{self._world.rank}.pt"
        torch.save(problem.batch, path)
        found = "; ".join(f"column {name!r} in rows {rows[:16]}" for name, rows in problem.suspects.items())
        found = found or "none of its columns (the backward pass itself overflowed, or another rank)"
        return ValueError(
            f"step {step}: the loss or the gradient of the {problem.actor} is not finite. "
            f"Not finite on rank {self._world.rank}: {found}. "
            f"The rows are saved in {path}; the weights are as they were before the step. Look at the rows, lower "
            f"{problem.actor}.optimizer.lr or {problem.actor}.optimizer.max_grad_norm, and start again: resume=fork "
            "starts from the last checkpoint with other values"
        )
