"""Line charts as inline SVG, with colours from the page's style sheet.

No chart library: Plotly inlines a script of 4.8 MB into every report, and Matplotlib's SVG has
fixed colours and no hover. Each figure contains its values as JSON for the page's hover script.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import NamedTuple

Point = tuple[float, float]
"""(step, value)"""

WIDTH = 420
HEIGHT = 220
LEFT = 48
RIGHT = 18
TOP = 10
BOTTOM = 26
MAX_POINTS = 400
"""Maximum number of points of a series.

Longer ones are reduced to the extremes of intervals, so spikes stay visible.
"""
MEANS_FROM = 120
"""A curve with at least this many points is drawn faint, under a line through means of neighbouring
points.
"""
_NUM_COLOURS = 8
_NUM_MEANS = 60
_TICKS = 5
_DOTS_UP_TO = 40
_FORMS = ((1e9, "{:.2e}"), (1e3, "{:,.0f}"), (100.0, "{:.4g}"), (1e-3, "{:.3g}"), (0.0, "{:.1e}"))
"""(least size, format)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve; `half_width` is a standard error drawn as a band, aligned with `points`."""

    name: str
    points: Sequence[Point]
    half_width: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the step, or over `x`, under one title. `note` is the unit or the denominator.

    `may_be_log`: the axis is logarithmic if the values span more than a factor of 50.
    """

    title: str
    series: Sequence[Series]
    note: str = ""
    x: str = "step"
    may_be_log: bool = False


class _Axis(NamedTuple):
    """Value -> pixel; values with their labels."""

    position: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def line_chart(chart: Chart) -> str:
    """Returns a <figure> with the chart, its legend (for two or more series) and its values for the
    hover script.
    """
    steps = [step for series in chart.series for step, _ in series.points]
    first = min(steps)
    last = max(steps)
    x_axis = _step_axis(first, last)
    y_axis = _value_axis(chart)
    curves = [
        _curve(series, f"s{n % _NUM_COLOURS}", x_axis, y_axis)
        for n, series in enumerate(chart.series)
    ]
    hover = {
        "x": chart.x,
        "left": round(x_axis.position(first), 1),
        "right": round(x_axis.position(last), 1),
        "first": first,
        "last": last,
        "series": [
            {
                "name": series.name,
                "points": [[step, float(f"{value:.5g}")] for step, value in _thin(series.points)],
            }
            for series in chart.series
        ],
    }
    # "<" could end the data block early; \u003c is the same string in JSON.
    data = json.dumps(hover, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    latest = [(series.name, format_number(series.points[-1][1])) for series in chart.series]
    label = f"{chart.title}: {', '.join(f'{name} {value}' for name, value in latest)}"
    items = "".join(
        f'<li><i class="s{n % _NUM_COLOURS}"></i>{escape(name)} <b>{value}</b></li>'
        for n, (name, value) in enumerate(latest)
    )
    note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
    return (
        f'<figure class="chart"><figcaption><span>{escape(chart.title)} {note}</span>'
        + (f"<output>{latest[0][1]}</output>" if len(latest) == 1 else "")
        + f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">'
        f'{_grid(x_axis, y_axis)}{"".join(curves)}<line class="cursor" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"/></svg>'
        + (f"<ul>{items}</ul>" if len(latest) > 1 else "")
        + f'<script type="application/json">{data}</script></figure>'
    )


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for value, text in y_axis.ticks:
        y = y_axis.position(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
    for value, text in x_axis.ticks:
        parts.append(
            f'<text class="x" x="{x_axis.position(value):.1f}" y="{HEIGHT - 8}">{text}</text>'
        )
    return "".join(parts)


def _curve(series: Series, colour: str, x_axis: _Axis, y_axis: _Axis) -> str:
    def path(points: Sequence[Point]) -> str:
        return " ".join(
            f"{x_axis.position(step):.1f},{y_axis.position(value):.1f}" for step, value in points
        )

    points = _thin(series.points)
    parts = []
    if series.half_width is not None and len(points) == len(series.points) > 1:
        pairs = list(zip(points, series.half_width, strict=True))
        # A band of shares ends at 0 and 1.
        low, high = (0.0, 1.0) if all(0 <= v <= 1 for _, v in points) else (-math.inf, math.inf)
        edge = [(s, min(v + w, high)) for (s, v), w in pairs] + [
            (s, max(v - w, low)) for (s, v), w in reversed(pairs)
        ]
        parts.append(f'<polygon class="band {colour}" points="{path(edge)}"/>')
    if len(points) > 1:
        faint = " faint" if len(series.points) >= MEANS_FROM else ""
        parts.append(f'<polyline class="curve{faint} {colour}" points="{path(points)}"/>')
        if faint:
            means = [
                (fmean(s for s, _ in part), fmean(v for _, v in part))
                for part in _cut(series.points, _NUM_MEANS)
            ]
            parts.append(f'<polyline class="curve {colour}" points="{path(means)}"/>')
    if len(points) <= _DOTS_UP_TO:
        for step, value in points:
            x = x_axis.position(step)
            y = y_axis.position(value)
            parts.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>')
    return "".join(parts)


def _cut(points: Sequence[Point], most: int) -> list[Sequence[Point]]:
    size = math.ceil(len(points) / most)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MAX_POINTS:
        return points
    kept: list[Point] = []
    for part in _cut(points, MAX_POINTS // 2):
        kept += sorted(
            {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        )
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _step_axis(first: float, last: float) -> _Axis:
    span = WIDTH - LEFT - RIGHT
    if first == last:
        return _Axis(lambda _: LEFT + span / 2, [(first, str(first))])
    ticks = [(tick, _tick(tick, 1.0)) for tick in _nice_ticks(first, last, 6) if tick == int(tick)]
    return _Axis(lambda v: LEFT + span * (v - first) / (last - first), ticks)


def _value_axis(chart: Chart) -> _Axis:
    values = [value for series in chart.series for _, value in series.points]
    low = min(values)
    high = max(values)
    if not 0 <= low <= high <= 1:  # a band may leave the range of the values
        bands = [
            (v, w)
            for s in chart.series
            if s.half_width
            for (_, v), w in zip(s.points, s.half_width, strict=True)
        ]
        low = min([low, *(v - w for v, w in bands)])
        high = max([high, *(v + w for v, w in bands)])
    if chart.may_be_log and low > 0 and high / low > 50.0:
        first = math.floor(math.log10(low))
        last = math.ceil(math.log10(high))
        powers = [
            10.0**power
            for power in range(first, last + 1, max(1, math.ceil((last - first) / _TICKS)))
        ]
        share = (HEIGHT - TOP - BOTTOM) / (last - first)
        return _Axis(
            lambda v: TOP + share * (last - math.log10(v)), [(v, format_number(v)) for v in powers]
        )
    if (
        low >= 0
        and high <= 1
        and (high - low > 0.2 or any("@" in series.name for series in chart.series))
    ):
        return _linear_axis(0.0, 1.0)  # shares use the whole range
    return _linear_axis(0.0 if 0 <= low < 0.5 * high else low, high)


def _linear_axis(low: float, high: float) -> _Axis:
    if high - low <= 1e-6 * max(
        abs(low), abs(high), 1e-300
    ):  # a flat curve: the axis must not magnify rounding noise
        margin = abs(high) * 0.1 or 1.0
        low = low if low == 0 else low - margin
        high = high + margin
    ticks = _nice_ticks(low, high, _TICKS)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    low = min(low, ticks[0])
    high = max(high, ticks[-1])
    height = HEIGHT - TOP - BOTTOM
    return _Axis(
        lambda v: TOP + height * (high - v) / (high - low),
        [(tick, _tick(tick, step)) for tick in ticks],
    )


def _nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _tick(value: float, step: float) -> str:
    """Enough decimals to distinguish two neighbouring ticks."""
    if abs(value) >= 10000 or abs(value) < 1e-3:
        return format_number(value)
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def format_number(value: float) -> str:
    """Three or four significant digits: `0.693`, `12.3`, `1,234`, `23.4k`, `1.2e-05`."""
    if value == 0:
        return "0"
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value / 1e3:.4g}k"
    return next(form for least, form in _FORMS if abs(value) >= least).format(value)
