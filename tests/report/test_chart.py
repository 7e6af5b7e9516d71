"""Curves: ticks, smoothing and coordinates by hand."""

import html
import json
import re

import pytest

from rft.logger.history import StageSpan
from rft.report.chart import MOST_POINTS, Curve, Scale, draw, smooth, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.013, 0.97, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.03, 0.06, [-0.04, -0.02, 0, 0.02, 0.04, 0.06]),
        (61.0, 260.0, [50, 100, 150, 200, 250, 300]),
        (1e-6, 5e-6, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_scale_by_hand() -> None:
    down = Scale(0.0, 2.0, 188.0, 16.0)
    assert [down(0), down(1), down(2)] == [188.0, 102.0, 16.0]


def test_smooth_by_hand() -> None:
    points = [(i, float(v)) for i, v in enumerate((0, 3, 6, 0, 9))]
    assert smooth(points, 1) == [(0, 0.0), (1, 3.0), (2, 3.0), (3, 5.0), (4, 9.0)]
    assert smooth([(0, 1.0), (1, None), (2, 3.0)], 2) == [(0, 1.0), (1, None), (2, 3.0)]


def test_a_curve_goes_through_its_points_and_breaks_at_a_nan() -> None:
    svg = draw("t", [Curve("a", [(0, 0.0), (5, 1.0), (6, None), (10, 0.5)])], width=156, height=138)
    # x: 0..10 over 46..146, y: 0..1 over 116..16
    assert re.search(r'<path class="line k0" d="([^"]*)"', svg)[1] == "M46.0 116.0L96.0 16.0M146.0 66.0"  # type: ignore[index]
    assert re.findall(r"<circle .*?/>", svg) == ['<circle class="k0" cx="146.0" cy="66.0" r="3"/>'], "no line shows it"


def test_long_ticks_have_room_at_the_left() -> None:
    svg = draw("t", [Curve("a", [(0, -0.00125), (10, -0.00121)])])
    labels = re.findall(r'<text class="tick" x="([^"]*)" y="[^"]*" text-anchor="end">([^<]*)<', svg)
    assert {len(text) for _, text in labels} == {8}, "the case wants long ones"
    assert all(float(right) >= 6 * len(text) + 2 for right, text in labels)


def test_a_line_breaks_between_stages() -> None:
    stages = [StageSpan("warmup", 0, 2), StageSpan("train", 2, 4)]
    svg = draw("t", [Curve("a", [(1, 0.0), (2, 1.0), (3, 0.0), (4, 1.0)])], stages)
    assert re.search(r'<path class="line k0" d="([^"]*)"', svg)[1].count("M") == 2  # type: ignore[index]
    assert svg.count('class="band"') == 1 and ">warmup</text>" in svg and ">train</text>" in svg
    assert "<circle" not in svg
    svg = draw("t", [Curve("a", [(1, 0.0), (2, 1.0), (3, 0.0)])], stages)
    assert svg.count("<circle") == 1, "the only point of its stage"


def test_noise_is_smoothed_and_a_schedule_is_not() -> None:
    noisy = draw("n", [Curve("a", [(i, float(i % 2)) for i in range(100)])])
    smooth_already = draw("s", [Curve("a", [(i, float(i)) for i in range(100)])])
    assert 'class="raw k0"' in noisy and 'class="line k0"' in noisy
    assert 'class="raw k0"' not in smooth_already and 'class="line k0"' in smooth_already


def test_evaluations_are_dots_with_error_bars() -> None:
    svg = draw("e", [Curve("accuracy", [(0, 0.0), (10, 0.5)], True, [0.0, 0.25])], width=156, height=116)
    assert svg.count("<circle") == 2
    bar = re.findall(r'<line class="error k0" ([^/]*)/', svg)[1]
    # y: 0..0.8 over 94..16
    assert bar == 'x1="146.0" x2="146.0" y1="69.6" y2="20.9"'


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    svg = draw("l", [Curve("a", [(i, float(i)) for i in range(10_000)])])
    data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', svg)[1]))  # type: ignore[index]
    (points,) = data["curves"]
    assert len(points) <= MOST_POINTS and points[-1] == [9999, 9989.5]


def test_evaluations_are_never_averaged() -> None:
    svg = draw("e", [Curve("accuracy", [(i, float(i)) for i in range(1000)], True)])
    data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', svg)[1]))  # type: ignore[index]
    assert data["curves"] == [[[i, float(i)] for i in range(1000)]] and "<circle" not in svg


def test_a_constant_a_single_point_and_zeros_can_be_drawn() -> None:
    for values in ([0.0, 0.0], [3.0], [-2.0, -2.0], [1e-9, 1e-9]):
        assert "nan" not in draw("c", [Curve("a", list(enumerate(values)))]).lower()


def test_a_curve_without_values_keeps_its_colour_but_is_not_drawn() -> None:
    svg = draw("t", [Curve("failed", []), Curve("b", [(0, 0.0), (1, 1.0)])])
    assert "failed" not in svg and "k1" in svg and "k0" not in svg


def test_a_chart_leaves_out_stages_without_a_point() -> None:
    stages = [StageSpan("warmup", 0, 100), StageSpan("train", 100, 110)]
    svg = draw("t", [Curve("a", [(101, 0.0), (110, 1.0)])], stages)
    assert ">warmup</text>" not in svg and ">train</text>" in svg and "&quot;x&quot;:[100,110," in svg
    svg = draw("t", [Curve("a", [(0, 0.0), (100, 1.0)])], stages)
    assert ">warmup</text>" in svg and ">train</text>" not in svg and "&quot;x&quot;:[0,100," in svg


def test_a_curve_that_hides_an_equal_one_is_dashed() -> None:
    points = [(0, 0.0), (1, 1.0)]
    svg = draw("t", [Curve("a", points), Curve("b", points), Curve("c", [(0, 1.0), (1, 0.0)])])
    assert re.findall(r'<path class="line ([^"]*)"', svg) == ["k0", "k1 dash", "k2"]
