"""`mode=train`: trains the policy."""

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from rft.evaluation.base import metric_value
from rft.logger.log import STARTED
from rft.setup.assembly import Job
from rft.setup.typed import typed_overrides
from rft.train.folder.run_folder import finished_run

LONGEST_SUFFIX = 128  # characters: file names have at most 255 bytes, and the run's name comes first
PLANS = "rft.modes.plan.largest"  # the program of mode=plan that prints the memory of each stage
PLAN_S = 90.0  # seconds in which the plan must be made; ranks that fail wait for it
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")


def train(config: dict[str, Any], console: Console) -> float:
    """Trains, and returns the value of the metric that the config names; a finished job of a sweep is not repeated.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero, for a job of a sweep that has finished before; a run creates its own.

    Raises:
        ValueError: lists all mistakes of the config and the data.
    """
    job, suffix = Job(config), sweep_suffix(config)
    if in_sweep():
        command = job.run_command(suffix)
        finished = job.join().decide(lambda: finished_run(command))
        if finished is not None:
            folder, numbers = finished
            STARTED.append(folder)  # the comparison of the sweep has this run too
            text = f"{folder} holds this run, finished; resume=never repeats it"
            console.print(text, soft_wrap=True, highlight=False)
            return metric_value(numbers, job.metric)
    return job.fit(suffix, memory_by_stage)


def memory_by_stage(config: Mapping[str, Any], ranks: int) -> dict[str, dict[str, int]] | None:
    """The bytes of every term at the peak of each stage, as `mode=plan` counts them in a process of its own; None for a
    run that has no plan.

    Args:
        config: of the run, resolved, as plain containers.
        ranks: number of processes of the run.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", PLANS, str(ranks)]
    try:
        ended = subprocess.run(
            command, input=json.dumps(config), env=environment, capture_output=True, text=True, timeout=PLAN_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if ended.returncode != 0:
        return None
    memory: dict[str, dict[str, int]] = json.loads(ended.stdout.splitlines()[-1])  # behind what plugins print
    return memory


def in_sweep() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def sweep_suffix(config: dict[str, Any]) -> str:
    """The suffix of this job's folder in a sweep: the overrides that `output_dir` does not show; empty outside a sweep.

    Args:
        config: the resolved config.
    """
    if not in_sweep():
        return ""
    shown = {"output_dir"}
    default = f"{config['data']['name']}-{config['algorithm']['name']}-seed{config['seed']}"
    for name, keys in ((config["name"], {"name"}), (default, {"data", "algorithm", "seed"})):
        if re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", config["output_dir"]):
            shown |= keys
    own = ",".join(sorted(text for text in typed_overrides() if text.partition("=")[0] not in shown))
    if not own:
        return ""
    suffix = "+" + re.sub(r"[^\w.,=+-]+", "_", own)
    if len(suffix) > LONGEST_SUFFIX:
        suffix = f"{suffix[: LONGEST_SUFFIX - 9]}~{zlib.crc32(suffix.encode()):08x}"
    return suffix
