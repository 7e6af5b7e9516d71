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
    """

    def __init__(self, run: Path, options: CheckpointOptions, world: World, watched: str) -> None:
        self.run = run
        self.folder = run / "checkpoints"
        self._options = options
        self._world = world
        self._watched = watched

    def due(self, step: int) -> bool:
        """True where a checkpoint is to be written after this step."""
        return self._options.every > 0 and step % self._options.every == 0

    def latest(self) -> Path | None:
        """The checkpoint that `latest` links to; without the link the newest one; None if there is none."""
        link = self.folder / "latest"
        return link.resolve() if link.exists() else max(self.folder.glob("step_*"), default=None)

    def read(self) -> dict[str, Any] | None:
        """The newest state, or None where there is none.

        Raises:
            ValueError: it is missing or damaged; names the file.
        """
        latest = self.latest()
        if latest is None:
            return None
        file = latest / "state.pt"
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"{file} cannot be read ({(str(error) or 'it ends early').splitlines()[0]}); restore it, let "
                f"{self.folder / 'latest'} link to an older checkpoint, or set resume=false to start again"
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
        self._prune()

    def _prune(self) -> None:
        steps = sorted(self.folder.glob("step_*"))
        metrics = {path: json.loads((path / "metric.json").read_text()) for path in steps}
        ranked = {path: rank_key(self._watched, value) for path, value in metrics.items() if value is not None}
        measured = sorted(ranked, key=lambda path: (ranked[path], path.name))
        best = measured[len(measured) - self._options.keep_best :] if self._options.keep_best else []
        newest = steps[-max(1, self._options.keep_last) :]
        for path in steps:
            if path not in best and path not in newest:
                shutil.rmtree(path)
