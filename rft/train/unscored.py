"""Why a run stops whose reward gives too few scores."""

from rft.batch.entries import UNSCORED


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
