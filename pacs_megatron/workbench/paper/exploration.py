"""Figure 5(b): the correct responses of two methods to sampled problems.

One panel a problem, as in the paper: the methods overlaid, each centred at the origin, as points
with contours of their density.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pacs_megatron.observability.page import NUM_COLOURS, page, safe_text
from pacs_megatron.workbench.diversity import Vectors, unit_rows

NUM_PANELS = 6
MIN_RESPONSES = 3
"""Correct responses of each method that a problem needs: fewer have no density"""
SHARES = (0.5, 0.9)
"""A contour is the level of density that this share of the points reaches."""
_GRID = 40
"""places a side of the density"""
_GRID_MARGIN = 3.0
"""around the points, in widths of the kernel"""
_SIZE = 380
_MARGIN = 1.25
"""half of a panel's width, in distances of the outermost point from the origin"""

Segment = tuple[tuple[float, float], tuple[float, float]]
Points = Mapping[str, np.ndarray]
"""Method -> float [responses, 2] or [responses, dimension]"""


def exploration_page(
    title: str, description: str, runs: Mapping[str, Sequence[Path]], vectors: Vectors
) -> str:
    """The page: a panel for each sampled problem.

    Args:
        title: of the page.
        description: of the embedder.
        runs: method -> its run folders, one a seed. All of them are drawn.
        vectors: the embeddings of all runs.
    """
    problems = problems_of(runs, vectors)
    chosen = sampled(problems)
    figures = [_panel(name, problems[name]) for name in chosen]
    inner, outer = SHARES
    note = (
        f"{len(chosen)} of {len(problems)} problems with at least {MIN_RESPONSES} correct "
        "responses of each method, sampled by their names. Principal components of a problem's "
        "embeddings; each method is centred at the origin. Contours: the density that "
        f"{inner:.0%} and {outer:.0%} of a method's points reach. Embedder: {description}"
    )
    drawn = f'<div class="charts">{"".join(figures)}</div>'
    return page(
        title,
        f'<main><h1>{safe_text(title)}</h1><p class="soft"><small>{safe_text(note)}</small></p>'
        f"{drawn}</main>",
    )


def problems_of(runs: Mapping[str, Sequence[Path]], vectors: Vectors) -> dict[str, Points]:
    """Problem -> the embeddings of each method, where every method has MIN_RESPONSES of them.

    A name is `<benchmark> <problem>`; the runs of a method are pooled.
    """
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    for method, folders in runs.items():
        names = {folder.name for folder in folders}
        for source, questions in vectors.items():
            run, _, _ = source.rpartition(" ")
            if Path(run).name not in names:
                continue
            for question, embeddings in questions.items():
                if len(embeddings):
                    found.setdefault(question, {}).setdefault(method, []).append(embeddings)

    problems: dict[str, Points] = {}
    for question, parts in sorted(found.items()):
        points = {method: np.concatenate(parts[method]) for method in runs if method in parts}
        if len(points) == len(runs) and min(map(len, points.values())) >= MIN_RESPONSES:
            problems[question] = points
    return problems


def sampled(names: Sequence[str] | Mapping[str, Points]) -> list[str]:
    """NUM_PANELS of the names, always the same ones, in their order."""

    def draw(name: str) -> bytes:
        return hashlib.sha256(name.encode("utf-8", "replace")).digest()

    return sorted(sorted(names, key=draw)[:NUM_PANELS])


def centred_plane(points: Points) -> dict[str, np.ndarray]:
    """The directions of the embeddings, less their method's mean, on the first two principal
    components of all methods together.

    Args:
        points: method -> float [responses, dimension].

    Returns:
        Method -> float [responses, 2], with the mean 0.
    """
    centred = {}
    for method, embeddings in points.items():
        directions = unit_rows(embeddings)
        centred[method] = directions - directions.mean(axis=0)
    together = np.concatenate(list(centred.values()))
    _, _, components = np.linalg.svd(together, full_matrices=False)
    axes = components[:2]
    return {method: rows @ axes.T for method, rows in centred.items()}


def density(points: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Gaussian kernel density of `points` at `places`, without its constant factor.

    Args:
        points: float [n, 2].
        places: float [m, 2].

    Returns:
        float [m].
    """
    distances = (places[:, None, :] - points[None, :, :]) / kernel_width(points)
    values: np.ndarray = np.exp(-0.5 * (distances**2).sum(axis=2)).mean(axis=1)
    return values


def kernel_width(points: np.ndarray) -> np.ndarray:
    """Scott's width of the kernel along each axis: n^(-1/6) standard deviations, float [2].

    Points on a line, or on one place, have a narrow density and no infinite one.
    """
    floor = max(float(np.abs(points).max()), 1e-12) * 1e-3
    width: np.ndarray = np.maximum(points.std(axis=0, ddof=1), floor) * len(points) ** (-1 / 6)
    return width


def contour(values: np.ndarray, level: float) -> list[Segment]:
    """The line on which a grid of values crosses `level`, by marching squares.

    Args:
        values: float [columns, rows].
        level: of the line.

    Returns:
        Segments between points (column, row), in cells; a cell has up to two.
    """
    segments = []
    for column in range(values.shape[0] - 1):
        for row in range(values.shape[1] - 1):
            crossings = _crossings(values, level, column, row)
            # A saddle has four: neighbouring edges are joined.
            for start in range(0, len(crossings) - 1, 2):
                segments.append((crossings[start], crossings[start + 1]))
    return segments


def _crossings(
    values: np.ndarray, level: float, column: int, row: int
) -> list[tuple[float, float]]:
    """The points on the edges of a cell where the values cross `level`, around the cell."""
    corners = ((0, 0), (1, 0), (1, 1), (0, 1))
    found = []
    for (x, y), (next_x, next_y) in zip(corners, corners[1:] + corners[:1], strict=True):
        start = values[column + x, row + y]
        end = values[column + next_x, row + next_y]
        if (start >= level) == (end >= level):
            continue
        share = (level - start) / (end - start)
        found.append((column + x + share * (next_x - x), row + y + share * (next_y - y)))
    return found


def _panel(name: str, points: Points) -> str:
    """A <figure>: points and contours of every method over one square around the origin."""
    plane = centred_plane(points)
    reach = max(float(np.abs(xy).max()) for xy in plane.values())
    half = _MARGIN * max(reach, 1e-9)
    pixels_per_unit = _SIZE / (2 * half)

    def pixel(x: float, y: float) -> str:
        return f"{(x + half) * pixels_per_unit:.1f},{(half - y) * pixels_per_unit:.1f}"

    middle = _SIZE / 2
    parts = [
        f'<line class="grid" x1="0" x2="{_SIZE}" y1="{middle}" y2="{middle}"/>',
        f'<line class="grid" x1="{middle}" x2="{middle}" y1="0" y2="{_SIZE}"/>',
    ]
    legend = []
    for number, (method, xy) in enumerate(plane.items()):
        colour = f"s{number % NUM_COLOURS}"
        parts += [_outline(xy, colour, pixel, share) for share in SHARES]
        for x, y in xy.tolist():
            place_x, place_y = pixel(x, y).split(",")
            parts.append(f'<circle class="dot {colour}" cx="{place_x}" cy="{place_y}" r="2.2"/>')
        legend.append(f'<li><i class="{colour}"></i>{safe_text(method)} <b>{len(xy)}</b></li>')
    label = ", ".join(f"{method} {len(xy)} responses" for method, xy in plane.items())
    return (
        f"<figure><figcaption><span>{safe_text(name)}</span></figcaption>"
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" role="img" '
        f'aria-label="{safe_text(f"{name}: {label}")}">{"".join(parts)}</svg>'
        f"<ul>{''.join(legend)}</ul></figure>"
    )


def _outline(
    xy: np.ndarray, colour: str, pixel: Callable[[float, float], str], share: float
) -> str:
    """The contour that `share` of the points lie inside, as a path.

    The grid is around this method's points, which may be close together.
    """
    margin = _GRID_MARGIN * kernel_width(xy)
    low = xy.min(axis=0) - margin
    scale = (xy.max(axis=0) + margin - low) / (_GRID - 1)
    columns, rows = np.meshgrid(np.arange(_GRID), np.arange(_GRID), indexing="ij")
    places = low + scale * np.column_stack([columns.ravel(), rows.ravel()])
    level = float(np.quantile(density(xy, xy), 1 - share))

    steps = []
    for segment in contour(density(xy, places).reshape(_GRID, _GRID), level):
        start, end = (pixel(*(low + scale * place)) for place in segment)
        steps.append(f"M{start}L{end}")
    return f'<path class="curve {colour}" d="{"".join(steps)}"/>'
