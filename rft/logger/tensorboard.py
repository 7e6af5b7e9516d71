"""Numbers for TensorBoard, as event files under `<run>/tensorboard`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.logger.service import COMPLETIONS, check_package
from rft.ranges import PositiveInt


@dataclass
class TensorBoard:
    """Writes every number under its name and the config as text.

    Args:
        flush_s: seconds after which what was logged is written to disk at the latest.
        log_completions: logs the sampled texts of a step as text.
    """

    flush_s: PositiveInt
    log_completions: bool

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        check_package("tensorboard")

    def open(self, run: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), flush_secs=self.flush_s)
        self._writer.add_text("config", _code(config))

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs the sampled texts as one text."""
        if self.log_completions:
            self._writer.add_text(COMPLETIONS, _code(rows), step)

    def rewind(self, step: int) -> None:
        """Marks all events after the step as void; TensorBoard then leaves them out."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer.close()
        self._writer = SummaryWriter(str(self._folder), flush_secs=self.flush_s, purge_step=step + 1)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _code(value: Any) -> str:
    """JSON as a code block of Markdown."""
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return "\n".join("    " + line for line in text.splitlines())
