"""The memory of each stage of a run by term, planned in a process of its own while the run holds its process group.

python -m rft.modes.plan.largest <ranks> < config.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from rft.modes.plan.job import PlanJob

SECONDS = 90.0  # in which the plan must be made; ranks that fail wait for it
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")


def memory_by_stage(config: Mapping[str, Any], ranks: int) -> dict[str, dict[str, int]] | None:
    """The bytes of every term at the peak of each stage, see `Forecast.memory`; None for a run that has no plan.

    Args:
        config: of the run, resolved, as plain containers.
        ranks: number of processes of the run.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "rft.modes.plan.largest", str(ranks)]
    try:
        ended = subprocess.run(
            command, input=json.dumps(config), env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if ended.returncode != 0:
        return None
    memory: dict[str, dict[str, int]] = json.loads(ended.stdout.splitlines()[-1])  # behind what plugins print
    return memory


def main() -> None:
    """Reads a config and writes its plan as one line of JSON."""
    job = PlanJob(json.load(sys.stdin) | {"mode": "plan"}, int(sys.argv[1]))
    sys.stdout.write("\n" + json.dumps(job.forecast().memory) + "\n")


if __name__ == "__main__":
    main()
