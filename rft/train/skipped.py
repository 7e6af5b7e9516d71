"""Updates that are not finite and do not stop the run: `faults.nonfinite=skip` and `drop_rows`."""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rft.actor.base import NonFiniteError
from rft.algorithm.roles import POLICY
from rft.distributed import World
from rft.logger.log import RunLog
from rft.metrics import Metrics
from rft.train.diverged import FaultOptions, NonFinitePolicy, spell_columns


class SkipNonFinite(NonFinitePolicy):
    """Skips an update that is not finite, or takes it again without some of its rows.

    Args:
        options, run, world, log: see `NonFinitePolicy`.
    """

    def __init__(self, options: FaultOptions, run: Path, world: World, log: RunLog) -> None:
        super().__init__(options, run, world, log)
        self._skipped: Counter[str] = Counter()  # of this step, by the key of the model
        self._dropped: defaultdict[str, Counter[int]] = defaultdict(Counter)  # of this step: updates without each unit

    def take(self, step: int, key: str, metrics: Metrics, update: Callable[[list[int]], None]) -> None:
        problem = self._try(metrics, update, [])
        if problem is not None:
            self._not_finite[key] += 1
            units = self._units_to_drop(problem)
            if units and self._try(metrics, update, units) is None:
                self._drop(step, problem, units, metrics)
                problem = None
        if problem is None:
            self._in_a_row[key] = 0
            return
        self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
        self._skipped[key] += 1
        self._skip(step, problem)

    def _units_to_drop(self, problem: NonFiniteError) -> list[int]:
        """The units of all ranks with a row that is not finite; empty where none is known, or none would be left.

        A column that is not finite in all units does not show which row is the cause: the number of one row has spread
        to all of them, for example in a mean over the batch.
        """
        if self._options.nonfinite != "drop_rows":
            return []
        units: Tensor = problem.batch["unit"]
        local = {name: units[rows].tolist() for name, rows in problem.suspects.items()}
        by_column, present = defaultdict[str, set[int]](set), set[int]()
        for suspects, held in self._world.gather((local, units.tolist())):
            present |= set(held)
            for name, found in suspects.items():
                by_column[name] |= set(found)
        chosen = set[int]().union(*(found for found in by_column.values() if found != present))
        return [] if chosen == present else sorted(chosen)

    def _drop(self, step: int, problem: NonFiniteError, units: list[int], metrics: Metrics) -> None:
        """Counts, and maybe saves, the rows without which an update was taken."""
        key, batch = problem.actor, problem.batch
        self._dropped[key].update(units)
        rows = torch.isin(batch["unit"], torch.tensor(units, dtype=torch.int64))
        metrics.count(_name(key, "dropped_rows"), int(rows.sum()))
        metrics.count(_name(key, "dropped_tokens"), int(batch["loss_mask"][rows].sum()))
        done = f"{int(rows.sum())} rows of rank {self._world.rank} are dropped from an update of the {key}"
        self._save_some(step, problem, done)

    def _skip(self, step: int, problem: NonFiniteError) -> None:
        """Stops the run, or saves the rows of a skipped update if they are among the first.

        Raises:
            ValueError: the update stops the run.
        """
        if self._in_a_row[problem.actor] > self._options.max_skipped:
            self._stop(step, problem, f"; faults.max_skipped={self._options.max_skipped} updates before it are skipped")
        self._save_some(step, problem, f"an update of the {problem.actor} is skipped")

    def _save_some(self, step: int, problem: NonFiniteError, done: str) -> None:
        """Saves this rank's rows of an update, with a warning, if `saved_updates` is not reached.

        Args:
            done: what has become of the update.
        """
        rank = self._world.rank
        if len(list(self._folder.glob(f"*_rank_{rank}.safetensors"))) < self._options.saved_updates:
            path = self._save(step, problem)
            self._log.warning(
                f"step {step}: {done}, because its loss or gradient is not finite. "
                f"Not finite on rank {rank}: {spell_columns(problem)}. The rows are saved in {path}"
            )

    def dropped_units(self, key: str, times: int) -> list[int]:
        found = sorted(unit for unit, number in self._dropped[key].items() if number >= times)
        self._dropped.clear()
        return found

    def record(self, metrics: Metrics) -> None:
        super().record(metrics)
        for key, number in self._in_a_row.items():  # the same on every rank
            metrics.largest(_name(key, "skipped_updates"), self._skipped[key])
            metrics.largest(_name(key, "skipped_in_a_row"), number)
            if self._options.nonfinite == "drop_rows":
                metrics.count(_name(key, "dropped_rows"), 0)
                metrics.count(_name(key, "dropped_tokens"), 0)
        self._skipped.clear()


def _name(key: str, name: str) -> str:
    return f"faults/{name}" if key == POLICY else f"{key}/faults/{name}"
