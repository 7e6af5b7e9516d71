"""The fitted curve of accuracy against compute: what it finds again, and when it says nothing."""

import json
import random

import pytest

from rft.logger.history import History
from rft.logger.log import RunLog
from rft.report.run_page import RUN_REPORT
from rft.report.scaling import ScalingCurve, fit, scaling_fit

STEPS = [10.0 * number for number in range(1, 13)]


def test_the_curve_by_hand():
    curve = ScalingCurve(start=0.2, asymptote=0.8, midpoint=10.0, efficiency=2.0, error=0.0)
    assert curve(10.0) == pytest.approx(0.5), "half of the gain at the midpoint"
    assert curve(20.0) == pytest.approx(0.2 + 0.6 / 1.25)


@pytest.mark.parametrize(
    ("start", "asymptote", "midpoint", "efficiency"),
    [
        (0.1, 0.9, 30.0, 1.5),
        (0.3, 0.61, 200.0, 0.7),
        (0.0, 1.0, 5.0, 3.0),
        (0.5, 0.2, 50.0, 2.0),
        (0.0, 0.5, 40.0, 9.0),
    ],
)
@pytest.mark.parametrize("count", [5, 12])
def test_points_of_a_curve_give_the_curve_back(start, asymptote, midpoint, efficiency, count):
    truth = ScalingCurve(start, asymptote, midpoint, efficiency, 0.0)
    found = fit([(step, truth(step)) for step in STEPS[:count]], start)
    assert (found.asymptote, found.midpoint) == pytest.approx((asymptote, midpoint), rel=1e-4)
    assert found.efficiency == pytest.approx(efficiency, rel=1e-3)
    assert found.start == start and found.error < 1e-6


def test_noise_moves_it_a_little_and_shows_in_the_error():
    truth, rng = ScalingCurve(0.1, 0.9, 30.0, 1.5, 0.0), random.Random(0)
    points = [(step / 2, truth(step / 2) + rng.gauss(0, 0.02)) for step in range(1, 401)]
    found = fit(points, 0.1)
    assert found.asymptote == pytest.approx(0.9, abs=0.02)
    assert found.midpoint == pytest.approx(30, rel=0.1) and found.efficiency == pytest.approx(1.5, rel=0.1)
    assert found.error == pytest.approx(0.02, rel=0.15)


def test_no_better_curve_is_near():
    rng = random.Random(1)
    points = [(step, rng.random()) for step in STEPS]
    found = fit(points, 0.3)
    for place in range(3):
        for factor in (0.99, 1.01):
            numbers = [found.asymptote, found.midpoint, found.efficiency]
            numbers[place] *= factor
            other = ScalingCurve(0.3, *numbers, 0.0)
            if numbers[0] <= 1 and 1 <= numbers[1] <= 1200 and 0.1 <= numbers[2] <= 10:
                error = (sum((other(step) - value) ** 2 for step, value in points) / len(points)) ** 0.5
                assert error >= found.error - 1e-9


def test_an_asymptote_is_an_accuracy():
    assert fit([(step, step / 130) for step in STEPS], 0.0).asymptote == 1.0
    assert fit([(step, 0.5 - step / 250) for step in STEPS], 0.5).asymptote == 0.0


def test_points_that_jump_at_once_and_points_that_come_back_are_fitted_too():
    found = fit([(step, 0.75) for step in STEPS], 0.25)
    assert found.asymptote == pytest.approx(0.75, abs=1e-3) and found.midpoint <= 10
    assert fit([(step, 0.5 + 0.1 * (-1) ** place) for place, step in enumerate(STEPS)], 0.5) is not None


@pytest.mark.parametrize("points", [[], [(1.0, 0.5)], [(step, step / 200) for step in STEPS[:4]]])
def test_of_few_points_nothing_is_said(points):
    assert fit(points, 0.0) is None


def test_of_a_run_that_never_moves_nothing_is_said():
    assert fit([(step, 0.25) for step in STEPS], 0.25) is None


def rows(warmup, evaluations):
    """A warm-up that ends at an accuracy of 0.2, then a stage on a curve to 0.8."""
    curve = ScalingCurve(0.2, 0.8, 15.0, 2.0, 0.0)
    found = [{"step": 0, "stage": "warmup" if warmup else "train", "eval/a/accuracy": 0.0 if warmup else 0.2}]
    if warmup:
        found.append({"step": warmup, "stage": "warmup", "eval/a/accuracy": 0.2, "eval/b/accuracy": 0.5})
    for number in range(1, evaluations + 1):
        found.append({"step": warmup + 5 * number - 1, "stage": "train", "loss/policy": 1.0})
        found.append({"step": warmup + 5 * number, "stage": "train", "eval/a/accuracy": curve(5.0 * number)})
    return found


@pytest.mark.parametrize("warmup", [0, 40])
def test_a_run_is_fitted_from_the_end_of_its_warm_up(warmup):
    [line] = scaling_fit(History(rows(warmup, 8)))
    assert line == (
        "eval/a/accuracy tends to 0.8: half of the gain by step 15 of the stage, efficiency 2, fitted to within "
        + line.rpartition(" ")[2]
    )
    assert scaling_fit(History(rows(warmup, 4))) == []
    assert scaling_fit(History([])) == []


def test_an_evaluation_without_a_start_or_a_number_is_passed_over():
    late = [{"step": 0, "stage": "train", "loss/policy": 1.0}, *rows(0, 8)[1:]]
    assert scaling_fit(History(late)) == []
    broken = rows(0, 8)
    broken[2]["eval/a/accuracy"] = None
    assert len(scaling_fit(History(broken))) == 1


def test_console_and_report_say_it(tmp_path, capsys):
    with RunLog(tmp_path, {}, report=RUN_REPORT) as log:
        for row in rows(0, 8):
            log.log(row.pop("step"), row.pop("stage"), row)
    line = scaling_fit(History([json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]))[0]
    assert line in capsys.readouterr().out
    assert line in (tmp_path / "report.html").read_text()
