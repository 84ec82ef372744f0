"""Line charts as inline SVG, with colours from the page's style sheet.

No chart library: Plotly inlines a script of 4.8 MB into every report, and Matplotlib's SVG has fixed colours and no hover.
Colours are CSS variables (`--s0` ...), so one drawing fits light and dark. Each figure contains its values as JSON for the
page's hover script.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[int, float]
"""(step, value)"""

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 18, 10, 26
NUM_COLOURS = 8
MAX_POINTS = 400
"""A longer series is reduced to the extremes of each interval of steps, so that spikes remain visible."""
MEANS_FROM = 120
"""A curve with at least this many points is drawn faint, under a line through means of neighbouring points."""
_NUM_MEANS = 60
_TICKS = 5
_LOG_FROM_RATIO = 50.0
_DOTS_UP_TO = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve; `half_width` is a standard error drawn as a band, aligned with `points`."""

    name: str
    points: Sequence[Point]
    half_width: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the step, or over `x`, under one title. `note` is the unit or the denominator."""

    title: str
    series: Sequence[Series]
    note: str = ""
    x: str = "step"
    may_be_log: bool = False
    """True: the axis is logarithmic if the values span more than a factor of 50."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps a value to a pixel; `ticks` are values."""

    position: Callable[[float], float]
    ticks: Sequence[float]
    labels: Sequence[str]


def line_chart(chart: Chart) -> str:
    """Returns a <figure> with the chart, its legend (for two or more series) and its values for the hover script."""
    steps = [step for series in chart.series for step, _ in series.points]
    x_axis = _step_axis(min(steps), max(steps))
    y_axis = _value_axis(chart)
    curves = [_curve(series, _colour(number), x_axis, y_axis) for number, series in enumerate(chart.series)]
    hover = {
        "x": chart.x,
        "left": round(x_axis.position(min(steps)), 1),
        "right": round(x_axis.position(max(steps)), 1),
        "first": min(steps),
        "last": max(steps),
        "series": [
            {"name": series.name, "points": [[step, float(f"{value:.5g}")] for step, value in _thin(series.points)]}
            for series in chart.series
        ],
    }
    # "<" could end the data block early; \u003c is the same string in JSON.
    data = json.dumps(hover, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    latest = [(series.name, format_number(series.points[-1][1])) for series in chart.series]
    label = f"{chart.title}: {', '.join(f'{name} {value}' for name, value in latest)}"
    items = "".join(
        f'<li><i class="{_colour(number)}"></i>{escape(name)} <b>{value}</b></li>'
        for number, (name, value) in enumerate(latest)
    )
    note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
    return (
        f'<figure class="chart"><figcaption><span>{escape(chart.title)} {note}</span>'
        + (f"<output>{latest[0][1]}</output>" if len(latest) == 1 else "")
        + f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'{_grid(x_axis, y_axis)}{"".join(curves)}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        + (f"<ul>{items}</ul>" if len(latest) > 1 else "")
        + f'<script type="application/json">{data}</script></figure>'
    )


# ------------------------------------------------------------------------------------------------------------- pieces
def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for value, text in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = y_axis.position(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
    for value, text in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis.position(value)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 8}">{text}</text>')
    return "".join(parts)


def _curve(series: Series, colour: str, x_axis: _Axis, y_axis: _Axis) -> str:
    points = _thin(series.points)
    places = [(x_axis.position(step), y_axis.position(value)) for step, value in points]
    parts = []
    if series.half_width is not None and len(points) == len(series.points) > 1:
        pairs = list(zip(series.points, series.half_width, strict=True))
        # A band of shares ends at 0 and 1.
        low, high = (0.0, 1.0) if all(0 <= v <= 1 for (_, v), _ in pairs) else (-math.inf, math.inf)
        above = [f"{x_axis.position(s):.1f},{y_axis.position(min(v + w, high)):.1f}" for (s, v), w in pairs]
        below = [f"{x_axis.position(s):.1f},{y_axis.position(max(v - w, low)):.1f}" for (s, v), w in reversed(pairs)]
        parts.append(f'<polygon class="band {colour}" points="{" ".join(above + below)}"/>')
    if len(places) > 1:
        faint = " faint" if len(series.points) >= MEANS_FROM else ""
        parts.append(f'<polyline class="curve{faint} {colour}" points="{_path(places)}"/>')
        if faint:
            means = [(x_axis.position(step), y_axis.position(value)) for step, value in _means(series.points)]
            parts.append(f'<polyline class="curve {colour}" points="{_path(means)}"/>')
    if len(places) <= _DOTS_UP_TO:
        parts.extend(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
    return "".join(parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _colour(number: int) -> str:
    return f"s{number % NUM_COLOURS}"


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / (MAX_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        extremes = {
            min(range(len(stretch)), key=lambda i: stretch[i][1]),
            max(range(len(stretch)), key=lambda i: stretch[i][1]),
        }
        kept.extend(stretch[i] for i in sorted(extremes))
    if kept[-1] != points[-1]:
        kept.append(points[-1])  # the last point of the run
    return kept


def _means(points: Sequence[Point]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / _NUM_MEANS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(_mean([step for step, _ in s]), _mean([value for _, value in s])) for s in stretches]


# --------------------------------------------------------------------------------------------------------------- axes
def _step_axis(first: int, last: int) -> _Axis:
    span = WIDTH - LEFT - RIGHT
    if first == last:
        return _Axis(lambda _: LEFT + span / 2, [first], [str(first)])
    ticks = [t for t in _nice_ticks(first, last, 6) if t == int(t)]
    return _Axis(lambda v: LEFT + span * (v - first) / (last - first), ticks, [_tick(t, 1.0) for t in ticks])


def _value_axis(chart: Chart) -> _Axis:
    values = [value for series in chart.series for _, value in series.points]
    low, high = min(values), max(values)
    if not 0 <= low <= high <= 1:  # a band may leave the range of the values
        bands = [(v, w) for s in chart.series if s.half_width for (_, v), w in zip(s.points, s.half_width, strict=True)]
        low, high = min([low, *(v - w for v, w in bands)]), max([high, *(v + w for v, w in bands)])
    if chart.may_be_log and low > 0 and high / low > _LOG_FROM_RATIO:
        return _log_axis(low, high)
    if low >= 0 and high <= 1 and (high - low > 0.2 or any("@" in series.name for series in chart.series)):
        return _linear_axis(0.0, 1.0)  # shares use the whole range
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    return _linear_axis(low, high)


def _linear_axis(low: float, high: float) -> _Axis:
    if high - low <= 1e-6 * max(abs(low), abs(high), 1e-300):  # a flat curve: the axis must not magnify rounding noise
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if low == 0 else low - margin), high + margin
    ticks = _nice_ticks(low, high, _TICKS)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    height = HEIGHT - TOP - BOTTOM
    return _Axis(lambda v: TOP + height * (high - v) / (high - low), ticks, [_tick(t, step) for t in ticks])


def _log_axis(low: float, high: float) -> _Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / _TICKS))
    ticks = [10.0**power for power in range(first, last + 1, stride)]
    height = HEIGHT - TOP - BOTTOM

    def position(value: float) -> float:
        return TOP + height * (last - math.log10(value)) / (last - first)

    return _Axis(position, ticks, [format_number(t) for t in ticks])


def _nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


# ------------------------------------------------------------------------------------------------------------ numbers
def _tick(value: float, step: float) -> str:
    """Enough decimals to distinguish two neighbouring ticks."""
    if abs(value) >= 10000 or abs(value) < 1e-3:
        return format_number(value)
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def format_number(value: float) -> str:
    """Three or four significant digits: `0.693`, `12.3`, `1,234`, `23.4k`, `1.2e-05`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9:
        return f"{value:.2e}"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size >= 1e3:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}" if size < 100 else f"{value:.4g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
