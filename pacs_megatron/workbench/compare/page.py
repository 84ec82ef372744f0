"""The outputs of `compare`: a self-contained page, JSON, CSV and a LaTeX table."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pacs_megatron.observability.charts import Chart, Series, line_chart
from pacs_megatron.observability.metric_words import words_of
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.workbench.compare.compare import THRESHOLDS, Method, Run, RunComparison

_TRAINING = (
    "policy/entropy",
    "policy/entropy_step_start",
    "optimizer/grad_norm",
    "response/len_mean",
)
"""Metrics with a chart, beside the scores and the reward"""
_MAX_COST_CHARTS = 4
Points = dict[int, list[tuple[float, float]]]
"""Step or k -> (x value, value) of each run that has it"""
_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\~{}",
        "^": r"\^{}",
        "[": "{[}",  # after the end of a row, "[" starts an argument
        "\n": " ",
    }
)


_CHART_PIXELS = 380
"""Least width of a chart, where the screen has it"""


def compare_html(comparison: RunComparison) -> str:
    """The page."""
    names = [method.label for method in comparison.methods]
    title = " · ".join(names)
    tasks = safe_text(", ".join(comparison.tasks))
    verdicts = "".join(f"<p>{safe_text(sentence)}</p>" for sentence in comparison.sentences())
    if not verdicts:
        verdicts = "<p>One method: nothing to compare.</p>"
    parts = [
        f"<h1>{safe_text(title)}</h1>",
        f'<p class="soft"><small>Score: final pass@1, or final reward, of {tasks}. Brackets are '
        "95 % intervals by stratified bootstrap over seeds; bands are the standard error over "
        "seeds.</small></p>",
        f'<div class="card">{verdicts}</div>',
    ]
    tables = {
        "Scores": _score_rows(comparison),
        "Start and rise": progress_rows(comparison),
        "Runs": _run_rows(comparison),
    }
    if comparison.differences:
        tables["What differs"] = _difference_rows(comparison)
    drawn_tables = [
        f"<section><h2>{heading}</h2>{_table(rows)}</section>" for heading, rows in tables.items()
    ]
    parts.append(f'<div class="tables">{"".join(drawn_tables)}</div>')

    sections = []
    for heading, charts in _sections(comparison):
        drawn = [line_chart(chart) for chart in charts if chart.series]
        if drawn:
            # A section is as wide as its charts, so that short ones share a line and all charts
            # have one size.
            width = f"flex:{len(drawn)} 1 {_CHART_PIXELS * len(drawn)}px"
            sections.append(
                f'<section style="{width}"><h2>{heading}</h2>'
                f'<div class="charts">{"".join(drawn)}</div></section>'
            )
    parts.append(f'<div class="sections">{"".join(sections)}</div>')
    return page(f"Comparison: {title}", f'<main class="full">{"".join(parts)}</main>')


# ------------------------------------------------------------------------------------------- tables
def _difference_rows(comparison: RunComparison) -> list[list[str]]:
    """A header, and a row for each differing key."""
    rows = [["key", *(method.label for method in comparison.methods)]]
    for key, values in comparison.differences.items():
        rows.append([key, *("–" if value is None else str(value) for value in values)])
    return rows


def _run_rows(comparison: RunComparison) -> list[list[str]]:
    """A header, and a row for each run: its method, name, seed and last step."""
    rows = [["method", "run", "seed", "last step"]]
    for method in comparison.methods:
        for run in method.runs:
            rows.append([method.label, run.name, str(run.seed), str(run.rows[-1]["step"])])
    return rows


def progress_rows(comparison: RunComparison) -> list[list[str]]:
    """A header, and a row for each method and task: the means over the runs at the start and at the
    end, and the rise between them. `-` where no run has a first value.
    """
    rows = [["method", "runs", "task", "start", "end", "rise"]]
    for method in comparison.methods:
        for number, task in enumerate(comparison.tasks):
            starts = method.starts[:, number]
            ends = method.scores[:, number]
            cells = ["-", f"{ends.mean():.3f}", "-"]
            if not np.isnan(starts).any():
                rise = (ends - starts).mean()
                cells = [f"{starts.mean():.3f}", f"{ends.mean():.3f}", f"{rise:+.3f}"]
            rows.append([method.label, str(len(method.runs)), task, *cells])
    return rows


def _score_rows(comparison: RunComparison, mean_format: str = "{:.3f} ± {:.3f}") -> list[list[str]]:
    """A header, and a row for each method.

    Args:
        comparison: the comparison.
        mean_format: shows a mean and its standard error, where a method has several runs.
    """
    rows = [["method", "seeds", *comparison.tasks, "interquartile mean"]]
    for method in comparison.methods:
        of_mean = "{:.3f}"
        of_iqm = "{:.3f}"
        if len(method.runs) > 1:
            of_mean = mean_format
            of_iqm = "{:.3f} [{:.3f}, {:.3f}]"
        means = method.scores.mean(axis=0)
        errors = _standard_error(method.scores)
        cells = [of_mean.format(*pair) for pair in zip(means, errors, strict=True)]
        rows.append([method.label, str(len(method.runs)), *cells, of_iqm.format(*method.iqm)])
    return rows


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Over the first axis; zeros for one row."""
    count = len(values)
    if count == 1:
        return np.zeros(values.shape[1])
    error: np.ndarray = values.std(axis=0, ddof=1) / math.sqrt(count)
    return error


def _table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first row is the header."""
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = "".join(f"<{tag}>{safe_text(cell)}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="card wide"><table>{"".join(lines)}</table></div>'


# ------------------------------------------------------------------------------------------- charts
def _sections(comparison: RunComparison) -> Iterator[tuple[str, list[Chart]]]:
    """(heading, charts) of each section of the page."""
    methods = comparison.methods
    learning = [f"eval/{task}/pass@1" for task in comparison.tasks]
    learning.append("reward/mean")
    yield "Learning", [_curves(methods, key) for key in learning]

    charts = [_pass_at_k(methods, task) for task in comparison.tasks]
    yield "pass@k", [chart for chart in charts if _has_a_curve(chart)]

    by_cost = []
    for key in learning[:_MAX_COST_CHARTS]:
        for x in ("seconds", "tokens"):
            by_cost.append(_curves(methods, key, x))
    yield "Wall-clock and tokens", by_cost

    yield "Training", [_curves(methods, key) for key in _TRAINING]
    yield "Profiles", [_profile(methods)]


def _has_a_curve(chart: Chart) -> bool:
    return any(len(series.points) > 1 for series in chart.series)


def _profile(methods: Sequence[Method]) -> Chart:
    series = []
    for method in methods:
        points = []
        half_width = []
        for threshold, interval in zip(THRESHOLDS, method.profile, strict=True):
            points.append((round(100 * threshold), interval.value))
            half_width.append((interval.high - interval.low) / 2)
        series.append(Series(name=method.label, points=points, half_width=half_width))
    note = "share of runs and tasks above the score; band: width of the 95 % interval"
    return Chart(title="performance profile", series=series, note=note, x="score %")


def _curves(methods: Sequence[Method], key: str, x: str = "step") -> Chart:
    """The metric `key` of each method: mean over the seeds that have the step, standard error.

    Over seconds or tokens a curve has only the steps that all seeds have: a seed that ends early
    would move the mean of x.
    """
    series = []
    for method in methods:
        points: Points = {}
        for run in method.runs:
            for row, place in zip(run.rows, _places(run, x), strict=True):
                if row.get(key) is not None:
                    points.setdefault(row["step"], []).append((place, row[key]))
        if x != "step":
            num_seeds = max(map(len, points.values()), default=0)
            points = {step: pairs for step, pairs in points.items() if len(pairs) == num_seeds}
        series += _series(method, points)
    title, unit = words_of(key)
    if x != "step":
        title = f"{title} by {x}"
    return Chart(title=title, series=series, note=unit, keys=key, x=x)


def _places(run: Run, x: str) -> Sequence[float]:
    """The x value of each row of a run: its step, or the seconds or tokens up to it."""
    if x == "step":
        return [row["step"] for row in run.rows]
    seconds = np.array([row.get("time/step_s") or 0.0 for row in run.rows])
    if x == "tokens":
        rates = np.array([row.get("tokens_per_s") or 0.0 for row in run.rows])
        return np.cumsum(seconds * rates)  # type: ignore[return-value]
    return np.cumsum(seconds * 1.0)  # type: ignore[return-value]


def _series(method: Method, points: Points) -> list[Series]:
    """The line of a method; [] without points."""
    if not points:
        return []
    means = []
    errors = []
    for _, values in sorted(points.items()):
        pairs = np.array(values, np.float64)
        means.append((round(pairs[:, 0].mean()), float(pairs[:, 1].mean())))
        errors.append(float(_standard_error(pairs)[1]))
    return [Series(name=method.label, points=means, half_width=errors)]


def _pass_at_k(methods: Sequence[Method], task: str) -> Chart:
    """pass@k over k at the end of the runs, or of their evaluations."""
    prefix = f"eval/{task}/pass@"
    series = []
    for method in methods:
        points: Points = {}
        for run in method.runs:
            for k in _ks_of(run, prefix):
                score = run.score(f"{prefix}{k}")
                if score is not None:
                    points.setdefault(k, []).append((k, score))
        series += _series(method, points)
    return Chart(title=task, series=series, note="pass@k", keys=f"{prefix}k", x="k")


def _ks_of(run: Run, prefix: str) -> list[int]:
    """The k of a run's pass@k: of its evaluation, or of its steps, never of both."""
    rows = [run.results] if f"{prefix}1" in run.results else run.rows
    ks: dict[int, None] = {}  # in the order of their first row, each once
    for row in rows:
        for key in row:
            word = key.removeprefix(prefix)
            if key.startswith(prefix) and word.isdecimal():
                ks[int(word)] = None
    return list(ks)


# -------------------------------------------------------------------------------------------- files
def compare_json(comparison: RunComparison) -> str:
    """All numbers of the page except the curves, as JSON."""
    methods = {}
    for method in comparison.methods:
        methods[method.label] = {
            "runs": [run.name for run in method.runs],
            "seeds": [run.seed for run in method.runs],
            "scores": method.scores.tolist(),
            "interquartile_mean": method.iqm._asdict(),
            "performance_profile": [interval.value for interval in method.profile],
            "performance_profile_interval": [interval[1:] for interval in method.profile],
        }
    improvements = []
    for (x, y), chance in comparison.improvements.items():
        improvements.append({"x": x, "y": y, **chance._asdict()})
    record: dict[str, Any] = {
        "tasks": comparison.tasks,
        "differences": comparison.differences,
        "methods": methods,
        "probability_of_improvement": improvements,
        "sentences": comparison.sentences(),
    }
    return json.dumps(record, indent=1) + "\n"


def compare_csv(comparison: RunComparison) -> str:
    """One line per run and task: method, run, seed, task, score."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "run", "seed", "task", "score"])
    for method in comparison.methods:
        for run, scores in zip(method.runs, method.scores.tolist(), strict=True):
            for task, score in zip(comparison.tasks, scores, strict=True):
                writer.writerow([method.label, run.name, run.seed, task, score])
    return out.getvalue()


def compare_latex(comparison: RunComparison) -> str:
    """A `tabular` for the package booktabs.

    It has the mean and the standard error over seeds, and the interquartile mean with its interval.
    """
    header, *rows = _score_rows(comparison, r"${:.3f} \pm {:.3f}$")
    header_line = _latex_line([cell.translate(_LATEX) for cell in header])
    # Cells of numbers are LaTeX already.
    lines = [_latex_line([row[0].translate(_LATEX), *row[1:]]) for row in rows]
    columns = "l" + "r" * (len(header) - 1)
    body = "\n".join(lines)
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{header_line}\n\\midrule\n"
        f"{body}\n\\bottomrule\n\\end{{tabular}}\n"
    )


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
