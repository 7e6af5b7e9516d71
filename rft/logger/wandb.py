"""Numbers for Weights & Biases; `mode=offline` keeps them under `<run>/wandb` for a later `wandb sync`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rft.logger.service import COMPLETIONS, check_package, run_id, table_with_media


@dataclass
class Wandb:
    """One W&B run for each run folder; its id lies in `<run>/wandb_id`, so a continued run continues there too.

    Args:
        project, entity, tags: as W&B knows them; an entity of null is the account's default.
        mode: `online`, `offline` or `disabled`.
        log_completions: logs the sampled texts of a step as a table.
    """

    project: str
    entity: str | None
    mode: Literal["online", "offline", "disabled"]
    tags: list[str]
    log_completions: bool

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        check_package("wandb")

    def open(self, run: Path, config: dict[str, Any]) -> None:
        import wandb

        self._folder = run
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            tags=self.tags,
            name=run.name,
            id=run_id(run, "wandb"),
            resume="allow" if self.mode == "online" else None,  # an offline run is joined by its id at sync
            dir=str(run),
            config=config,
            reinit="create_new",
            settings=wandb.Settings(console="off"),  # its capture of stdout would break the live display
        )
        # W&B's own step can never go back, a run that is continued from a checkpoint does
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, "stage": stage, **numbers})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a `wandb.Table` of the sampled texts and their media; W&B shows the newest one, and keeps the others."""
        if self.log_completions:
            import wandb

            columns, data = table_with_media(step, rows, self._folder, wandb)
            self._run.log({"step": step, COMPLETIONS: wandb.Table(columns=columns, data=data)})

    def rewind(self, step: int) -> None:
        """W&B keeps what was logged: steps that are taken twice show twice."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
