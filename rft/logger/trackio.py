"""Numbers for Trackio, which keeps them in a local database (`TRACKIO_DIR`) or sends them to a Space of the hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.logger.service import COMPLETIONS, check_package, completions_table, run_id


@dataclass
class Trackio:
    """One Trackio run for each run folder, named after the folder and the id in `<run>/trackio_id`.

    Trackio finds the run that is continued by its name, which therefore must not be that of another folder.

    Args:
        project, space_id: as Trackio knows them; a space_id of null keeps the numbers on this machine.
        log_completions: logs the sampled texts of a step as a table.
    """

    project: str
    space_id: str | None
    log_completions: bool

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        check_package("trackio")

    def open(self, run: Path, config: dict[str, Any]) -> None:
        import trackio

        name = f"{run.name}-{run_id(run, 'trackio')}"
        self._run = trackio.init(self.project, name, space_id=self.space_id, config=config, resume="allow", embed=False)

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        self._run.log({"stage": stage, **numbers}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a `trackio.Table` of the sampled texts."""
        if self.log_completions:
            import trackio

            columns, data = completions_table(step, rows)
            self._run.log({COMPLETIONS: trackio.Table(columns=columns, data=data)}, step=step)

    def rewind(self, step: int) -> None:
        """Trackio keeps what was logged: steps that are taken twice show twice."""

    def close(self, failed: bool) -> None:
        import trackio

        trackio.finish()  # the run's own `finish` would be called again when the process ends
