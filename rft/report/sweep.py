"""The Hydra callback that compares the runs of a sweep.

Hydra imports this file while it composes the config, so it must import nothing slow.
"""

import os
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rft.imports import import_part
from rft.logger.log import STARTED


class CompareRuns(Callback):
    """Compares the jobs of a multirun. The page is rewritten after every job, so an interrupted sweep leaves one too.

    The table is printed at the end; after a failed job it is printed after every job, because Hydra then ends the
    multirun with that error and calls no callback. A single run is not compared. Under torchrun only rank 0 writes.
    """

    def __init__(self) -> None:
        self._comparison: Any = None
        self._known = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            comparison = import_part("rft.report.comparison", "Comparison", "--multirun")
            self._comparison = comparison(Path(config.hydra.sweep.dir))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._known = len(STARTED)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self._comparison is not None:
            self._comparison.add(STARTED[-1] if len(STARTED) > self._known else None, job_return)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self._comparison is not None:
            self._comparison.show()
