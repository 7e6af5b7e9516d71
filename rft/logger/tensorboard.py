"""Numbers for TensorBoard, as event files under `<run>/tensorboard`."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft.ranges import PositiveInt


class TensorBoard:
    """Writes every number under its name and the config as text.

    Args:
        flush_s: seconds after which what was logged is written to disk at the latest.
    """

    def __init__(self, flush_s: PositiveInt) -> None:
        self.flush_s = flush_s

    def check(self) -> None:
        """Raises a ValueError where the package is missing."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                "logger=tensorboard: the package tensorboard is not installed; pip install 'rft[tensorboard]'"
            )

    def open(self, run: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), flush_secs=self.flush_s)
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()))

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Marks all events after the step as void; TensorBoard then leaves them out."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer.close()
        self._writer = SummaryWriter(str(self._folder), flush_secs=self.flush_s, purge_step=step + 1)

    def close(self, failed: bool) -> None:
        self._writer.close()
