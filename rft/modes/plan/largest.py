"""Prints the memory of each stage of a run by term. A run that has none left starts this process, see
`rft.modes.train.memory_by_stage`: it holds its own process group.

python -m rft.modes.plan.largest <ranks> < config.json
"""

import json
import sys

from rft.modes.plan.job import PlanJob


def main() -> None:
    """Reads a config and writes its plan as one line of JSON."""
    job = PlanJob(json.load(sys.stdin) | {"mode": "plan"}, int(sys.argv[1]))
    sys.stdout.write("\n" + json.dumps(job.forecast().memory) + "\n")


if __name__ == "__main__":
    main()
