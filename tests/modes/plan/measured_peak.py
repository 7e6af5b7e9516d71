"""The memory that a process takes for a run beside the plan's word on it, of the configs of a file.

python measured_peak.py small.json config.json peak.json
"""

import gc
import json
import sys
from pathlib import Path

import torch

from rft.modes.plan.job import PlanJob
from rft.setup.assembly import Job


def read(path: str) -> dict:
    return json.loads(Path(path).read_text())


def kept(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def main() -> None:
    torch.set_num_threads(1)
    small, config, out = sys.argv[1:]
    memory = PlanJob(read(config) | {"mode": "plan"}, 1).forecast().memory
    planned, stage = max((sum(terms.values()), stage) for stage, terms in memory.items())
    Job(read(small)).fit("")  # what is imported and set up on the way is the process, not the run
    gc.collect()
    before = kept("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the process
    Job(read(config)).fit("")
    Path(out).write_text(json.dumps({"stage": stage, "planned": planned, "measured": kept("VmHWM") - before}))


if __name__ == "__main__":
    main()
