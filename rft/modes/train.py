"""`mode=train`: trains the policy."""

import re
import zlib
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from rft.modes.plan.largest import memory_by_stage
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
    return Job(config).fit(sweep_suffix(config), memory_by_stage)


def sweep_suffix(config: dict[str, Any]) -> str:
    """The suffix of this job's folder in a sweep: the overrides that `output_dir` does not show; empty outside a sweep.

    Args:
        config: the resolved config.
    """
    if not HydraConfig.initialized():
        return ""
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return ""
    shown = {"output_dir"}
    default = f"{config['data']['name']}-{config['algorithm']['name']}-seed{config['seed']}"
    for name, keys in ((config["name"], {"name"}), (default, {"data", "algorithm", "seed"})):
        if re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", config["output_dir"]):
            shown |= keys
    own = ",".join(sorted(text for text in hydra.overrides.task if text.partition("=")[0] not in shown))
    if not own:
        return ""
    suffix = "+" + re.sub(r"[^\w.,=+-]+", "_", own)
    if len(suffix) > LONGEST_SUFFIX:
        suffix = f"{suffix[: LONGEST_SUFFIX - 9]}~{zlib.crc32(suffix.encode()):08x}"
    return suffix
