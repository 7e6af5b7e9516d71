"""What the numbers of a step say against the run: an engine that samples from another distribution than the one that
trains is warned of, and a reward that gives too few scores ends the run.
"""

from collections.abc import Mapping

from rft.algorithm.divergence import TOLERANCE
from rft.batch.row_fields import UNSCORED
from rft.errors import same_command

DTYPE = "float32"  # in other dtypes rounding explains large gaps
GAP = "rollout/logprob_gap_max"


def gap_warning(step: int, numbers: Mapping[str, float]) -> str:
    """The warning for the first step whose rows are all of the current weights; empty if its largest gap is allowed.

    Args:
        step: that has just been taken.
        numbers: of the step; trainer and engine compute in float32 and nothing truncates the distribution.
    """
    if numbers[GAP] <= TOLERANCE[DTYPE]:
        return ""
    return (
        f"WARNING: {GAP}={numbers[GAP]:.2g} at step {step}; {DTYPE} allows {TOLERANCE[DTYPE]:g}. The engine does not "
        "sample from the distribution that trains, so the run learns from wrong log-probabilities. This command finds "
        f"the cause: {same_command('doctor')}"
    )


def unscored_problem(numbers: dict[str, float], rows: int, most: float) -> str:
    """Why a run with too many rows without a score stops; empty if it does not.

    Args:
        numbers: of the step.
        rows: of the step, on all ranks.
        most: the share of them that may be unscored.
    """
    missing = numbers.get(f"reward/{UNSCORED}", 0.0)
    if missing <= most * rows:
        return ""
    middle = f"/{UNSCORED}/"
    reasons = [
        f"{name.removeprefix('reward/').replace(middle, ': ')} in {count:g}"
        for name, count in numbers.items()
        if middle in name
    ]
    return (
        f"{missing:g} of the {rows} rows of the step have no score ({', '.join(reasons)}), which is more than "
        f"reward.max_unscored={most:g}; a checkpoint is saved: repair the reward and run the command again"
    )
