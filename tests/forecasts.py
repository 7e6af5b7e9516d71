"""Forecasts of the configs of a file, each in terms of plain numbers. No process group is left over.

python forecasts.py configs.json forecasts.json
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from rft.rehearsal import Rehearsal


def main() -> None:
    torch.set_num_threads(1)
    configs = json.loads(Path(sys.argv[1]).read_text())
    found = {name: asdict(Rehearsal(config, 1).forecast()) for name, config in configs.items()}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
