"""Line charts as inline SVG, with colours from the page's style sheet.

No chart library: Plotly inlines a script of 4.8 MB into every report, and Matplotlib's SVG has
fixed colours and no hover. Each figure contains its values as JSON for the page's hover script.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple, TypeVar

from pacs_megatron.observability.page import NUM_COLOURS

T = TypeVar("T")
Point = tuple[float, float]
"""(step, value)"""

WIDTH = 420
HEIGHT = 232
LEFT = 60
RIGHT = 18
TOP = 10
BOTTOM = 38
"""Size of a chart and its margins, in the pixels of its view box"""
_PLOT_WIDTH = WIDTH - LEFT - RIGHT
_PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
"""Size of the area of the curves"""
MAX_POINTS = 400
"""Maximum number of points of a series.

Longer ones are reduced to the extremes of intervals, so spikes stay visible.
"""
MEANS_FROM = 20
"""A curve with at least this many points is drawn faint, under the line of its moving mean."""
_MEAN_SHARE = 1 / 12
"""Share of the points that a moving mean is over"""
_MAX_AXIS_TITLE = 34
"""Characters that fit along the axis; a longer note stands beside the title"""
_NUM_TICKS = 5
_NUM_STEP_TICKS = 6
_DOTS_UP_TO = 40
_LOG_FROM = 50.0
"""Ratio of the largest to the smallest value, above which an axis may be logarithmic"""
_FORMATS = (
    (1e9, "{:.2e}"),
    (1e3, "{:,.0f}"),
    (100.0, "{:.4g}"),
    (1e-3, "{:.3g}"),
    (0.0, "{:.1e}"),
)
"""(least size, format)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve."""

    name: str
    """the text of the legend"""
    points: Sequence[Point]
    """at least one, by ascending step"""
    half_width: Sequence[float] | None = None
    """a standard error of each point, drawn as a band"""

    @property
    def steps(self) -> list[float]:
        return [step for step, _ in self.points]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the step, or over `x`, under one title."""

    title: str
    series: Sequence[Series]
    note: str = ""
    """the unit or the denominator"""
    keys: str = ""
    """the keys of the metrics that it shows, as in metrics.jsonl"""
    x: str = "step"
    may_be_log: bool = False
    """the axis is logarithmic if the values span more than a factor of 50"""
    is_stacked: bool = False
    """areas on top of each other, the first one at the bottom; all series have the same steps"""


class _Axis(NamedTuple):
    """A scale of the chart."""

    position: Callable[[float], float]
    """Value -> pixel, from the left or from the top"""
    ticks: Sequence[tuple[float, str]]
    """(value, label)"""


def line_chart(chart: Chart) -> str:
    """Returns a <figure> with the chart, its legend and its values for the hover script.

    Instead of a legend, a chart of one series shows its last value beside the title.
    """
    first = min(min(series.steps) for series in chart.series)
    last = max(max(series.steps) for series in chart.series)
    x_axis = _step_axis(first, last)
    y_axis = _value_axis(chart)
    if chart.is_stacked:
        curves = _stacked(chart.series, x_axis, y_axis)
    else:
        curves = [
            _curve(series, _colour(number), x_axis, y_axis)
            for number, series in enumerate(chart.series)
        ]

    latest = [(series.name, format_number(series.values[-1])) for series in chart.series]
    latest_text = ", ".join(f"{name} {value}" for name, value in latest)
    label = f"{chart.title}: {latest_text}"
    fits_axis = len(chart.note) <= _MAX_AXIS_TITLE
    y_title = chart.note if fits_axis else ""
    note = "" if fits_axis else f"<small>{escape(chart.note)}</small>"
    keys = f"<code>{escape(chart.keys)}</code>" if chart.keys else ""
    output = f"<output>{latest[0][1]}</output>" if len(latest) == 1 else ""
    legend = _legend(latest) if len(latest) > 1 else ""
    data = _hover_data(chart, x_axis, first, last)
    return (
        f'<figure class="chart"><figcaption><span>{escape(chart.title)} {note}{keys}</span>{output}'
        f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{_grid(x_axis, y_axis, chart.x, y_title)}'
        f"{''.join(curves)}"
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>{legend}'
        f'<script type="application/json">{data}</script></figure>'
    )


def _colour(number: int) -> str:
    """The style class of the series."""
    return f"s{number % NUM_COLOURS}"


def _legend(latest: Sequence[tuple[str, str]]) -> str:
    """Colour, name and last value of each series."""
    items = [
        f'<li><i class="{_colour(number)}"></i>{escape(name)} <b>{value}</b></li>'
        for number, (name, value) in enumerate(latest)
    ]
    return f"<ul>{''.join(items)}</ul>"


def _hover_data(chart: Chart, x_axis: _Axis, first: float, last: float) -> str:
    """JSON of the values and of the pixels of the first and last step, for the page's script."""
    curves = []
    for series in chart.series:
        points = [[step, float(f"{value:.5g}")] for step, value in _thin(series.points)]
        curves.append({"name": series.name, "points": points})
    data = {
        "x": chart.x,
        "left": round(x_axis.position(first), 1),
        "right": round(x_axis.position(last), 1),
        "first": first,
        "last": last,
        "series": curves,
    }
    # "<" could end the data block early; \u003c is the same string in JSON.
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _grid(x_axis: _Axis, y_axis: _Axis, x_title: str, y_title: str) -> str:
    """Horizontal lines with their labels at the left, the labels of the steps below, and the titles
    of both axes.
    """
    middle = LEFT + _PLOT_WIDTH / 2
    parts = [f'<text class="x" x="{middle:.1f}" y="{HEIGHT - 5}">{escape(x_title)}</text>']
    if y_title:
        place = f"translate(11 {TOP + _PLOT_HEIGHT / 2:.1f}) rotate(-90)"
        parts.append(f'<text class="x" transform="{place}">{escape(y_title)}</text>')
    for value, text in y_axis.ticks:
        y = y_axis.position(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
    for value, text in x_axis.ticks:
        x = x_axis.position(value)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{text}</text>')
    return "".join(parts)


def _curve(series: Series, colour: str, x_axis: _Axis, y_axis: _Axis) -> str:
    """The elements of one series, later ones on top: band, line, line of means, dots."""

    def path(points: Sequence[Point]) -> str:
        return " ".join(
            f"{x_axis.position(step):.1f},{y_axis.position(value):.1f}" for step, value in points
        )

    points = _thin(series.points)
    is_thinned = len(points) < len(series.points)
    parts = []
    if series.half_width is not None and len(points) > 1 and not is_thinned:
        band = path(_band(points, series.half_width))
        parts.append(f'<polygon class="band {colour}" points="{band}"/>')

    if len(points) > 1:
        faint = " faint" if len(series.points) >= MEANS_FROM else ""
        parts.append(f'<polyline class="curve{faint} {colour}" points="{path(points)}"/>')
        if faint:
            means = path(_means(series.points))
            parts.append(f'<polyline class="curve {colour}" points="{means}"/>')

    if len(points) <= _DOTS_UP_TO:
        parts += _dots(points, colour, x_axis, y_axis)
    return "".join(parts)


def _dots(points: Sequence[Point], colour: str, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """A dot at each point, which shows single points of a short curve."""
    dots = []
    for step, value in points:
        x = x_axis.position(step)
        y = y_axis.position(value)
        dots.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>')
    return dots


def _band(points: Sequence[Point], half_width: Sequence[float]) -> list[Point]:
    """The outline of a band: its upper edge from left to right, its lower edge back."""
    upper = []
    lower = []
    edges = _band_edges([value for _, value in points], half_width)
    for (step, _), (low, high) in zip(points, edges, strict=True):
        upper.append((step, high))
        lower.append((step, low))
    return upper + lower[::-1]


def _band_edges(values: Sequence[float], half_width: Sequence[float]) -> list[tuple[float, float]]:
    """(lower, upper) edge of a band at each point. A band of shares ends at 0 and 1."""
    are_shares = all(0 <= value <= 1 for value in values)
    edges = []
    for value, width in zip(values, half_width, strict=True):
        low = value - width
        high = value + width
        if are_shares:
            low = max(low, 0.0)
            high = min(high, 1.0)
        edges.append((low, high))
    return edges


def _means(points: Sequence[Point]) -> Sequence[Point]:
    """The moving mean of the values; at the ends its window has the points of one side only."""
    half = max(2, round(len(points) * _MEAN_SHARE / 2))
    sums = list(accumulate((value for _, value in points), initial=0.0))
    means = []
    for number, (step, _) in enumerate(points):
        start = max(0, number - half)
        end = min(len(points), number + half + 1)
        means.append((step, (sums[end] - sums[start]) / (end - start)))
    return _thin(means)


def _stacked(series: Sequence[Series], x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """An area for each series, on top of the ones before; of a long run, means of neighbours."""
    rows = list(zip(*(line.points for line in series), strict=True))
    parts = _cut(rows, MAX_POINTS)
    steps = [fmean(row[0][0] for row in part) for part in parts]
    below = [0.0] * len(parts)
    areas = []
    for number in range(len(series)):
        above = []
        for base, part in zip(below, parts, strict=True):
            above.append(base + fmean(row[number][1] for row in part))
        outline = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        places = " ".join(
            f"{x_axis.position(step):.1f},{y_axis.position(value):.1f}" for step, value in outline
        )
        areas.append(f'<polygon class="area {_colour(number)}" points="{places}"/>')
        below = above
    return areas


def _cut(points: Sequence[T], max_parts: int) -> list[Sequence[T]]:
    """Parts of neighbouring points, all of one size but the last."""
    size = math.ceil(len(points) / max_parts)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most MAX_POINTS points, and the last one: the extremes of each part."""
    if len(points) <= MAX_POINTS:
        return points

    def value_of(point: Point) -> float:
        return point[1]

    extremes: list[Point] = []
    for part in _cut(points, MAX_POINTS // 2):
        extremes += sorted({min(part, key=value_of), max(part, key=value_of)})
    if extremes[-1] != points[-1]:
        extremes.append(points[-1])
    return extremes


def _step_axis(first: float, last: float) -> _Axis:
    """The axis of steps: ticks at whole numbers only, a single step in the middle."""

    def position(step: float) -> float:
        return LEFT + _PLOT_WIDTH * (step - first) / (last - first)

    if first == last:
        return _Axis(lambda _: LEFT + _PLOT_WIDTH / 2, [(first, str(first))])
    ticks = [
        (tick, _tick(tick, 1.0))
        for tick in _nice_ticks(first, last, _NUM_STEP_TICKS)
        if tick == int(tick)
    ]
    return _Axis(position, ticks)


def _value_axis(chart: Chart) -> _Axis:
    """The axis of values: logarithmic, from 0 to 1, from 0, or from the least value."""
    low = min(min(series.values) for series in chart.series)
    high = max(max(series.values) for series in chart.series)
    if chart.is_stacked:
        rows = zip(*(series.values for series in chart.series), strict=True)
        return _linear_axis(0.0, max(sum(values) for values in rows))

    are_shares = 0 <= low <= high <= 1
    for series in chart.series:
        if series.half_width:  # a band may leave the range of the values
            edges = _band_edges(series.values, series.half_width)
            low = min(low, *(lower for lower, _ in edges))
            high = max(high, *(upper for _, upper in edges))

    if chart.may_be_log and low > 0 and high / low > _LOG_FROM:
        return _log_axis(low, high)
    is_pass_chart = any("@" in series.name for series in chart.series)
    if are_shares and (high - low > 0.2 or is_pass_chart):
        return _linear_axis(0.0, 1.0)  # shares use the whole range
    starts_at_zero = 0 <= low < 0.5 * high
    return _linear_axis(0.0 if starts_at_zero else low, high)


def _log_axis(low: float, high: float) -> _Axis:
    """A logarithmic axis from a power of ten to a power of ten."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / _NUM_TICKS))
    ticks = [10.0**power for power in range(first, last + 1, step)]
    pixels_per_power = _PLOT_HEIGHT / (last - first)

    def position(value: float) -> float:
        return TOP + pixels_per_power * (last - math.log10(value))

    return _Axis(position, [(tick, format_number(tick)) for tick in ticks])


def _linear_axis(low: float, high: float) -> _Axis:
    """An axis that contains `low`, `high` and every tick."""
    # A flat curve: the axis must not magnify rounding noise.
    if high - low <= 1e-6 * max(abs(low), abs(high), 1e-300):
        margin = abs(high) * 0.1 or 1.0
        low = low if low == 0 else low - margin
        high = high + margin

    ticks = _nice_ticks(low, high, _NUM_TICKS)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    bottom = min(low, ticks[0])
    top = max(high, ticks[-1])

    def position(value: float) -> float:
        return TOP + _PLOT_HEIGHT * (top - value) / (top - bottom)

    return _Axis(position, [(tick, _tick(tick, step)) for tick in ticks])


def _nice_ticks(low: float, high: float, num_intervals: int) -> list[float]:
    """Round values of an axis: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: Least value of the axis.
        high: Largest value of the axis.
        num_intervals: Maximum number of distances between two of them.
    """
    raw_step = (high - low) / num_intervals
    power = 10.0 ** math.floor(math.log10(raw_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw_step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _tick(value: float, step: float) -> str:
    """Enough decimals to distinguish two neighbouring ticks."""
    if abs(value) >= 10000 or abs(value) < 1e-3:
        return format_number(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


def format_number(value: float) -> str:
    """Three or four significant digits: `0.693`, `12.3`, `1,234`, `23.4k`, `1.2e-05`."""
    size = abs(value)
    if value == 0:
        return "0"
    if 1e6 <= size < 1e9:
        return f"{value / 1e6:.4g}M"
    if 1e4 <= size < 1e6:
        return f"{value / 1e3:.4g}k"
    number_format = next(form for least, form in _FORMATS if size >= least)
    return number_format.format(value)
