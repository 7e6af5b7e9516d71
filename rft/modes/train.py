"""`mode=train`: trains the policy."""

import re
import zlib
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from rft.setup.assembly import Job

LONGEST_SUFFIX = 128  # characters: file names have at most 255 bytes, and the run's name comes first


def train(config: dict[str, Any], console: Console) -> float:
    """Trains, and returns the value of the metric that the config names.

    Args:
        config: the resolved config as plain containers.
        console: not used; the run creates its own.

    Raises:
        ValueError: lists all mistakes of the config and the data.
    """
    return Job(config).fit(sweep_suffix())


def sweep_suffix() -> str:
    """The suffix of this job's folder in a sweep: the overrides of the job; empty outside a sweep."""
    if not HydraConfig.initialized():
        return ""
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN or not hydra.job.override_dirname:
        return ""
    suffix = "+" + re.sub(r"[^\w.,=+-]+", "_", hydra.job.override_dirname)
    if len(suffix) > LONGEST_SUFFIX:
        suffix = f"{suffix[: LONGEST_SUFFIX - 9]}~{zlib.crc32(suffix.encode()):08x}"
    return suffix
