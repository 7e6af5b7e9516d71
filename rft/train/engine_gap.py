"""The warning of a run whose engine samples from another distribution than the one that trains."""

from collections.abc import Mapping

from rft.algorithm.mismatch import TOLERANCE
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
