"""Numbers for MLflow: a tracking server, or a local database."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.logger.media import MEDIA, media_files
from rft.logger.service import COMPLETIONS, check_package, completions_table

REFUSED = re.compile(r"[^\w\-. :/]")  # characters that MLflow does not take in the name of a metric


@dataclass
class MLflow:
    """One MLflow run for each run folder; its id lies in `<run>/mlflow_id`, so a continued run continues there too.

    Args:
        tracking_uri: of the server or database; null: that of `MLFLOW_TRACKING_URI`, else MLflow's default.
        experiment_name, tags: as MLflow knows them; the experiment is created if it does not exist.
        log_completions: logs the sampled texts of a step as a table.
    """

    tracking_uri: str | None
    experiment_name: str
    tags: dict[str, str]
    log_completions: bool

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        check_package("mlflow")

    def open(self, run: Path, config: dict[str, Any]) -> None:
        """Begins or continues the run; raises a ValueError if the server or the database does not accept it."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._folder = run
        note = run / "mlflow_id"
        try:
            self._client = MlflowClient(self.tracking_uri)
            if note.exists():
                self._id = note.read_text(encoding="utf-8").strip()
                self._client.update_run(self._id, status="RUNNING")
            else:
                found = self._client.get_experiment_by_name(self.experiment_name)
                experiment = found.experiment_id if found else self._client.create_experiment(self.experiment_name)
                self._id = self._client.create_run(experiment, tags=self.tags, run_name=run.name).info.run_id
                note.write_text(self._id, encoding="utf-8")
            self._client.log_text(self._id, json.dumps(config, indent=2, default=str), "config.json")
        except MlflowException as error:
            what = f"the run of {note} cannot be continued" if note.exists() else "no run can be created"
            raise ValueError(f"logger.mlflow.tracking_uri={self.tracking_uri}: {what}: {error}") from error

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(metric_name(name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table of the sampled texts as an artifact, one for each step, and the files of media that it names."""
        if self.log_completions:
            columns, data = completions_table(step, rows)
            table = dict(zip(columns, map(list, zip(*data, strict=True)), strict=True))
            self._client.log_table(self._id, table, f"{COMPLETIONS}/step_{step:08d}.json")
            for file in dict.fromkeys(media_files([*map(dict, rows)], self._folder)):
                self._client.log_artifact(self._id, str(file.path), MEDIA)

    def rewind(self, step: int) -> None:
        """MLflow keeps what was logged: steps that are taken twice show twice."""

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def metric_name(name: str) -> str:
    """The name that MLflow takes: `pass@4` becomes `pass_at_4`, any other character that it refuses becomes `_`."""
    return REFUSED.sub("_", name.replace("@", "_at_"))
