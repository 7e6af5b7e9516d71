"""Statistics over seeds, by hand."""

import math

import pytest

from rft.logger.history import History
from rft.report.seeds import last_common_step, mean_curve, mean_std, paired_difference


def history(*values: float | None, elapsed: float = 0.0) -> History:
    rows = [{"step": i, "stage": "train", "a": v, "time/elapsed_s": elapsed} for i, v in enumerate(values)]
    return History(rows)


def test_mean_and_sample_deviation() -> None:
    assert mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7.0)))  # (4 + 1 + 9) / 2
    assert mean_std([5.0]) == (5.0, 0.0)


def test_differences_are_those_of_equal_seeds() -> None:
    baseline = {"0": 1.0, "1": 5.0, "2": 9.0}
    mean, half, pairs = paired_difference(baseline, {"2": 12.0, "0": 2.0, "1": 7.0, "9": 100.0}) or (0, 0, 0)
    assert (mean, pairs) == (2.0, 3)  # 3, 1, 2: deviation 1
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert paired_difference(baseline, {"1": 4.0}) == (-1.0, None, 1)
    assert paired_difference(baseline, {"9": 1.0}) is None


def test_a_mean_curve_has_the_steps_that_all_have() -> None:
    points, deviations = mean_curve([history(1.0, 4.0, 3.0, 8.0), history(3.0, 4.0, None)], "a")
    assert points == [(0, 2.0), (1, 4.0), (2, None)]
    assert deviations == [pytest.approx(math.sqrt(2.0)), 0.0, None]


def test_times_do_not_make_runs_different() -> None:
    assert last_common_step([history(1, 2, 3, 4), history(1, 2, 5, 4, elapsed=9.0)]) == 1
    assert last_common_step([history(1, 2), history(1, 2, 3)]) == 1
    assert last_common_step([history(1, 2), history(0, 2)]) is None
    assert last_common_step([history(1, 2), history(1, 2, elapsed=9.0)]) is None
