"""Kills asynchronous runs of one config at random moments and continues each by the same command.

    python asynchronous_kills.py FOLDER COUNT

FOLDER/config.json is the resolved config of a run in the folder `run` below FOLDER. FOLDER/outcomes.json has for each
kill: the last step that was logged before it, the prompts whose groups the last checkpoint held, and those that were
answered afterwards; and for each run its ledger and its numbers at the end. COUNT kills are tried.
"""

import json
import os
import random
import shutil
import sys
from functools import partial
from pathlib import Path

from rft.train.checkpoint.saved_state import SavedState
from tests.e2e.kills import fit, forked, logged
from tests.e2e.older_weights import ANSWERED


def latest(run):
    """The state of the last checkpoint of a run; None without one."""
    folder = run / "checkpoints" / "latest"
    return SavedState(folder.resolve()) if folder.exists() else None


def held(run):
    """The prompts whose groups the last checkpoint has, by the order in which they were drawn."""
    state = latest(run)
    if state is None or "ahead" not in state["source"]:
        return []
    ahead = state["source"]["ahead"]
    ordinals = {position: ordinal for ordinal, position, _ in ahead["drawn"]}
    return [ordinals[int(group[0]["group"])] for group in ahead["done"]]


def answered():
    """What was answered since the last call."""
    file = Path(ANSWERED)
    found = [int(line) for line in file.read_text().split()] if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def main():
    os.chdir(sys.argv[1])
    config, run, draw = json.loads(Path("config.json").read_text()), Path("run"), random.Random(5)
    _, whole_s = forked(partial(fit, config))
    shutil.rmtree(run)
    answered()
    kills, runs, left = [], [], int(sys.argv[2])
    while left:
        killed, before = True, []
        while killed:
            kill = draw.uniform(0.1, 0.3) + 0.2 * (left % 4) if left else None  # early and late ones
            left -= kill is not None
            killed, _ = forked(partial(fit, config, kill, whole_s))
            if before:
                kills[-1]["after"] = answered()
            answered()
            before = [logged(run)] if killed else []
            if killed:
                kills.append({"step": logged(run), "held": held(run), "after": []})
            elif not (run / "result.json").exists():
                killed = True
        numbers = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        runs.append({"ledger": latest(run)["ledger"], "numbers": numbers})
        shutil.rmtree(run)
    Path("outcomes.json").write_text(json.dumps({"kills": kills, "runs": runs}))


if __name__ == "__main__":
    main()
