"""Numbers for SwanLab; `mode=offline` keeps them under `<run>/swanlab` for a later `swanlab sync`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rft.logger.service import COMPLETIONS, check_package, completions_table, run_id


@dataclass
class SwanLab:
    """One SwanLab run for each run folder; its id lies in `<run>/swanlab_id`, so a continued run continues there too.

    Args:
        project, workspace, tags: as SwanLab knows them; a workspace of null is the account's default.
        mode: `online`, `offline` or `disabled`.
        log_completions: logs the sampled texts of a step as a table.
    """

    project: str
    workspace: str | None
    mode: Literal["online", "offline", "disabled"]
    tags: list[str]
    log_completions: bool

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        check_package("swanlab")

    def open(self, run: Path, config: dict[str, Any]) -> None:
        import swanlab

        self._run = swanlab.init(
            project=self.project,
            workspace=self.workspace,
            mode=self.mode,
            tags=self.tags,
            name=run.name,
            id=run_id(run, "swanlab"),
            resume="allow",
            log_dir=str(run / "swanlab"),
            config=config,
            reinit=True,
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),  # its capture would break the live display
        )

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table of the sampled texts."""
        if self.log_completions:
            import swanlab

            table = swanlab.echarts.Table()
            table.add(*completions_table(step, rows))
            self._run.log({COMPLETIONS: table}, step=step)

    def rewind(self, step: int) -> None:
        """SwanLab keeps what was logged."""

    def close(self, failed: bool) -> None:
        self._run.finish("crashed" if failed else "success", "the run failed" if failed else None)
