"""Forecasts of the configs of a file, or what is wrong with them, by their names.

python forecasts.py configs.json forecasts.json
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rft.errors import Problems
from rft.modes.plan.job import PlanJob


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, config in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            found[name] = asdict(PlanJob(config, 1).forecast())
        except Problems as problems:
            found[name] = problems.messages
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
