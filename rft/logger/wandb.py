"""Numbers for Weights & Biases; `mode=offline` keeps them under `<run>/wandb` for a later `wandb sync`."""

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal


class Wandb:
    """One W&B run for each run folder; its id lies in `<run>/wandb_id`, so a continued run continues there too.

    Args:
        project, entity, tags: as W&B knows them; an entity of null is the account's default.
        mode: `online`, `offline` or `disabled`.
    """

    def __init__(
        self, project: str, entity: str | None, mode: Literal["online", "offline", "disabled"], tags: list[str]
    ) -> None:
        self.project = project
        self.entity = entity
        self.mode = mode
        self.tags = tags

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("logger=wandb: the package wandb is not installed; pip install 'rft[wandb]'")

    def open(self, run: Path, config: dict[str, Any]) -> None:
        import wandb

        note = run / "wandb_id"
        if not note.exists():
            note.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            tags=self.tags,
            name=run.name,
            id=note.read_text(encoding="utf-8").strip(),
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

    def rewind(self, step: int) -> None:
        """W&B keeps what it was told: steps taken twice show twice."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
