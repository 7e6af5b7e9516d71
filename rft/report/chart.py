"""Draws curves as SVG text: axes with round ticks, shaded stages, a smoothed line over noisy values. No file access."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from rft.logger.history import Point, StageSpan, short

COLORS = 8  # the page defines the colors --c0 .. --c7
MOST_POINTS = 500  # a longer curve is reduced to bucket means
MOST_DOTS = 80
SMOOTH_FROM = 40  # shorter curves are not smoothed
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 16, 22
DIGIT = 6.5  # largest width of a character of a tick, in units of the SVG


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Args:
        dotted: marks every point and smooths nothing; for evaluations.
        errors: standard errors, one for each point, drawn as bars.
        band: distances above and below the line, one for each point, drawn as an area.
    """

    label: str
    points: Sequence[Point]
    dotted: bool = False
    errors: Sequence[float | None] = field(default=())
    band: Sequence[float | None] = field(default=())

    @cached_property
    def thinned(self) -> Sequence[Point]:
        """The points as they are drawn: of many points the means of buckets."""
        points = self.points
        if self.dotted or len(points) <= MOST_POINTS:
            return points
        size = math.ceil(len(points) / MOST_POINTS)
        result: list[Point] = []
        for bucket in (points[i : i + size] for i in range(0, len(points), size)):
            values = [value for _, value in bucket if value is not None]
            result.append((bucket[-1][0], sum(values) / len(values) if values else None))
        return result


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates of the SVG."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def draw(
    title: str, curves: Sequence[Curve], stages: Sequence[StageSpan] = (), width: int = 400, height: int = 210
) -> str:
    """An HTML card: title, legend with last values, and the SVG with its values as data for the page's script.

    Args:
        title: the heading; escaped, like every label.
        curves: with at least one finite point in all; the index selects the color.
        stages: shaded alternately and named at the top. The chart leaves out those before its first and after its
            last point.
    """
    finite = [(step, value) for curve in curves for step, value in curve.points if value is not None]
    assert finite, f"nothing to draw in {title!r}"
    first, last = min(step for step, _ in finite), max(step for step, _ in finite)
    stages = [stage for stage in stages if stage.end >= first and stage.start < last]
    edges = [edge for stage in stages for edge in (stage.start, stage.end)]
    y_ticks = ticks(*_span([end for curve in curves for end in _reach(curve)]), 5)
    left = max(LEFT, math.ceil(10 + DIGIT * max(len(short(tick)) for tick in y_ticks)))
    x = Scale(*_span([step for step, _ in finite] + edges), left, width - RIGHT)
    y = Scale(y_ticks[0], y_ticks[-1], height - BOTTOM, TOP)
    parts = _bands(stages, x, height)
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{width - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{y(tick) + 3.5}" text-anchor="end">{short(tick)}</text>')
    for tick in (t for t in ticks(x.low, x.high, 6) if x.low <= t <= x.high and t == int(t)):
        parts.append(f'<text class="tick" x="{x(tick)}" y="{height - 6}" text-anchor="middle">{short(tick)}</text>')
    drawn = [(index, curve) for index, curve in enumerate(curves) if _reach(curve)]
    parts += [_band(curve, index, x, y) for index, curve in drawn if curve.band]
    for index, curve in drawn:
        hides = any(curve.points == other.points for other in curves[:index])
        parts += _line(curve, index, hides, x, y, [stage.start for stage in stages])
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{height - BOTTOM}"/>')
    shown = [[[step, float(f"{v:.5g}")] for step, v in curve.thinned if v is not None] for _, curve in drawn]
    data = json.dumps({"x": [x.low, x.high, left, width - RIGHT], "curves": shown}, separators=(",", ":"))
    legend = "".join(_legend(curve, index) for index, curve in drawn)
    name = html.escape(title)
    return (
        f'<figure class="card chart" data-chart="{html.escape(data)}">'
        f'<figcaption><b>{name}</b><i class="at"></i></figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{"".join(parts)}</svg></figure>'
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [float(f"{i * gap:.12g}") for i in range(first, last + 1)]


def smooth(points: Sequence[Point], span: int) -> list[Point]:
    """Mean over `span` points on either side, half as many near the ends. Gaps stay gaps."""
    result: list[Point] = []
    for i, (step, value) in enumerate(points):
        reach = max(min(span, i, len(points) - 1 - i), span // 2)
        near = [v for _, v in points[max(0, i - reach) : i + reach + 1] if v is not None]
        result.append((step, None if value is None else sum(near) / len(near)))
    return result


def _reach(curve: Curve) -> list[float]:
    """The values of a curve, and the ends of its error bars and of its band."""
    values = [value for _, value in curve.thinned if value is not None]
    for around in (curve.errors, curve.band):
        for (_, value), error in zip(curve.points, around, strict=False):
            if value is not None and error is not None:
                values += [value - error, value + error]
    return values


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value, widened if they are equal."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    if low == 0:
        return 0.0, 1.0
    return low - abs(low) * 0.1, high + abs(high) * 0.1


def _is_noisy(points: Sequence[Point]) -> bool:
    """Whether the curve has many points and its total variation is far above its range."""
    values = [value for _, value in points if value is not None]
    variation = sum(abs(b - a) for a, b in pairwise(values))
    return len(values) >= SMOOTH_FROM and variation > 4 * (max(values) - min(values))


def _bands(stages: Sequence[StageSpan], x: Scale, height: int) -> list[str]:
    parts = []
    for index, stage in enumerate(s for s in stages if s.end > s.start):
        left, right = x(stage.start), x(stage.end)
        if index % 2 == 0:
            size = f'width="{right - left:.1f}" height="{height - TOP - BOTTOM}"'
            parts.append(f'<rect class="band" x="{left}" y="{TOP}" {size}/>')
        if right - left > 6 * len(stage.name):
            middle = f'x="{(left + right) / 2:.1f}" y="11" text-anchor="middle"'
            parts.append(f'<text class="stage" {middle}>{html.escape(stage.name)}</text>')
    return parts


def _runs(points: Sequence[Point]) -> list[list[tuple[int, float]]]:
    """The points between gaps."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if value is not None:
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return "".join("M" + "L".join(f"{x(step)} {y(value)}" for step, value in run) for run in _runs(points))


def _line(curve: Curve, index: int, hides: bool, x: Scale, y: Scale, cuts: Sequence[int]) -> list[str]:
    """The elements of a curve; one that hides an equal one is dashed, so that both are seen."""
    color = f"k{index % COLORS}" + (" dash" if hides or index >= COLORS else "")
    points = curve.thinned
    if curve.dotted:
        dots = [(step, value) for step, value in points if value is not None]
        parts = [f'<path class="line {color}" d="{_path(points, x, y)}"/>']
    else:
        # a line ends with its stage, so that a jump between stages is not drawn as a slope; one of one point is a dot
        pieces = [[p for p in points if a < p[0] <= b] for a, b in pairwise([-math.inf, *cuts, math.inf])]
        dots = [run[0] for piece in pieces for run in _runs(piece) if len(run) == 1]
        path = "".join(_path(piece, x, y) for piece in pieces)
        noisy = _is_noisy(points)
        parts = [f'<path class="{"raw" if noisy else "line"} {color}" d="{path}"/>']
        if noisy:
            path = "".join(_path(smooth(piece, max(3, len(piece) // 20)), x, y) for piece in pieces)
            parts.append(f'<path class="line {color}" d="{path}"/>')
    few = len(points) <= MOST_DOTS
    for (step, value), error in zip(points, curve.errors if few else (), strict=False):
        if value is not None and error is not None:
            ends = f'x1="{x(step)}" x2="{x(step)}" y1="{y(value - error)}" y2="{y(value + error)}"'
            parts.append(f'<line class="error {color}" {ends}/>')
    if few or not curve.dotted:
        parts += [f'<circle class="{color}" cx="{x(step)}" cy="{y(value)}" r="3"/>' for step, value in dots]
    return parts


def _band(curve: Curve, index: int, x: Scale, y: Scale) -> str:
    around = [
        (step, v, d) for (step, v), d in zip(curve.points, curve.band, strict=True) if v is not None and d is not None
    ]
    edge = [(step, v + d) for step, v, d in around] + [(step, v - d) for step, v, d in reversed(around)]
    corners = " ".join(f"{x(step)},{y(value)}" for step, value in edge)
    return f'<polygon class="spread k{index % COLORS}" points="{corners}"/>'


def _legend(curve: Curve, index: int) -> str:
    last = next((value for _, value in reversed(curve.points) if value is not None), None)
    return (
        f'<span><em class="k{index % COLORS}"></em>{html.escape(curve.label)} '
        f'<b class="now" data-last="{short(last)}">{short(last)}</b></span>'
    )
