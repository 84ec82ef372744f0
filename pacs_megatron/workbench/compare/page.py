"""The outputs of `compare`: a self-contained page, JSON, CSV and a LaTeX table."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pacs_megatron.observability.charts import Chart, Series, line_chart
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.workbench.compare.compare import THRESHOLDS, Comparison, Method

_CURVES = (
    ("reward/mean", "reward", "mean over samples"),
    ("policy/entropy", "entropy", "nats a token"),
    ("optimizer/grad_norm", "gradient norm", "before clipping"),
    ("response/len_mean", "response length", "tokens"),
)
_Places = dict[int, list[tuple[float, float]]]
"""Step or k -> (x value, value) of each run that has it"""
_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\~{}", "^": r"\^{}"}
)
_LATEX |= str.maketrans({"[": "{[}", "\n": " "})  # after the end of a row, "[" starts an argument


def compare_html(comparison: Comparison) -> str:
    """The page."""
    verdicts = "".join(f"<p>{safe_text(sentence)}</p>" for sentence in comparison.sentences())
    names = [method.label for method in comparison.methods]
    tasks = safe_text(", ".join(comparison.tasks))
    title = " · ".join(names)
    differ = [["key", *names]]
    for key, given in comparison.differences.items():
        differ.append([key, *("–" if value is None else str(value) for value in given)])
    parts = [
        f"<h1>{safe_text(title)}</h1>",
        f'<p class="soft"><small>Score: final pass@1, or final reward, of {tasks}. Brackets are '
        "95 % intervals "
        "by stratified bootstrap over seeds; bands are the standard error over seeds.</small></p>",
        f'<div class="card">{verdicts or "<p>One method: nothing to compare.</p>"}</div>',
        f"<h2>Scores</h2>{_table(_scores(comparison))}",
        f"<h2>What differs</h2>{_table(differ)}" if comparison.differences else "",
    ]
    for heading, charts in _sections(comparison):
        if drawn := [line_chart(chart) for chart in charts if chart.series]:
            parts.append(f'<h2>{heading}</h2><div class="charts">{"".join(drawn)}</div>')
    return page(f"Comparison: {title}", f"<main>{''.join(parts)}</main>")


def _scores(comparison: Comparison, mean: str = "{:.3f} ± {:.3f}") -> list[list[str]]:
    """The rows of the table, the header first; `mean` shows a mean and its standard error, if there
    is one.
    """
    rows = [["method", "seeds", *comparison.tasks, "interquartile mean"]]
    for m in comparison.methods:
        of_mean, of_iqm = (
            (mean, "{:.3f} [{:.3f}, {:.3f}]") if len(m.runs) > 1 else ("{:.3f}", "{:.3f}")
        )
        cells = map(of_mean.format, m.scores.mean(axis=0), _standard_error(m.scores))
        rows.append([m.label, str(len(m.runs)), *cells, of_iqm.format(*m.iqm)])
    return rows


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Over the first axis; zeros for one row."""
    count = len(values)
    error: np.ndarray = (
        values.std(axis=0, ddof=1) / math.sqrt(count) if count > 1 else np.zeros(values.shape[1])
    )
    return error


def _sections(comparison: Comparison) -> Iterator[tuple[str, list[Chart]]]:
    methods = comparison.methods
    learning = [*((f"eval/{task}/pass@1", task, "pass@1") for task in comparison.tasks), _CURVES[0]]
    yield "Learning", [_curves(methods, *curve) for curve in learning]
    passes = [_pass_at_k(methods, task) for task in comparison.tasks]
    yield (
        "pass@k",
        [chart for chart in passes if any(len(series.points) > 1 for series in chart.series)],
    )
    by_cost = [
        (key, f"{title} by {x}", note, x)
        for key, title, note in learning[:4]
        for x in ("seconds", "tokens")
    ]
    yield "Wall-clock and tokens", [_curves(methods, *curve) for curve in by_cost]
    yield "Training", [_curves(methods, *curve) for curve in _CURVES[1:]]
    profile = [
        Series(
            name=m.label,
            points=[(round(100 * t), v.value) for t, v in zip(THRESHOLDS, m.profile, strict=True)],
            half_width=[(v.high - v.low) / 2 for v in m.profile],
        )
        for m in methods
    ]
    note = "share of runs and tasks above the score; band: width of the 95 % interval"
    yield "Profiles", [Chart(title="performance profile", series=profile, note=note, x="score %")]


def _curves(methods: Sequence[Method], key: str, title: str, note: str, x: str = "step") -> Chart:
    """Mean over the seeds that have the step, and its standard error; over seconds or tokens, steps
    that all seeds have.
    """
    series = []
    for method in methods:
        at: _Places = {}
        for run in method.runs:
            seconds = np.array([row.get("time/step_s") or 0.0 for row in run.rows])
            rates = [row.get("tokens_per_s") or 0.0 for row in run.rows] if x == "tokens" else 1.0
            places = (
                [row["step"] for row in run.rows] if x == "step" else np.cumsum(seconds * rates)
            )
            for row, place in zip(run.rows, places, strict=True):
                if row.get(key) is not None:
                    at.setdefault(row["step"], []).append((place, row[key]))
        most = max(map(len, at.values()), default=0)
        series += _series(
            method, {k: found for k, found in at.items() if x == "step" or len(found) == most}
        )
    return Chart(title=title, series=series, note=note, x=x)


def _series(method: Method, at: _Places) -> list[Series]:
    pairs = [np.array(found, np.float64) for _, found in sorted(at.items())]
    points = [(round(p[:, 0].mean()), float(p[:, 1].mean())) for p in pairs]
    widths = [float(_standard_error(p)[1]) for p in pairs]
    return [Series(name=method.label, points=points, half_width=widths)] if at else []


def _pass_at_k(methods: Sequence[Method], task: str) -> Chart:
    """pass@k over k at the end of the runs, or of their evaluations."""
    series = []
    prefix = f"eval/{task}/pass@"
    for method in methods:
        at: _Places = {}
        for run in method.runs:
            rows = (
                [run.results] if f"{prefix}1" in run.results else run.rows
            )  # never a curve of both
            for key in {key: None for row in rows for key in row if key.startswith(prefix)}:
                k = key.removeprefix(prefix)
                score = run.score(key)
                if k.isdecimal() and score is not None:
                    at.setdefault(int(k), []).append((int(k), score))
        series += _series(method, at)
    return Chart(title=task, series=series, note="pass@k", x="k")


def compare_json(comparison: Comparison) -> str:
    """All numbers of the page except the curves, as JSON."""
    record: dict[str, Any] = {
        "tasks": comparison.tasks,
        "differences": comparison.differences,
        "methods": {
            m.label: {
                "runs": [run.name for run in m.runs],
                "seeds": [run.seed for run in m.runs],
                "scores": m.scores.tolist(),
                "interquartile_mean": m.iqm._asdict(),
                "performance_profile": [found.value for found in m.profile],
                "performance_profile_interval": [found[1:] for found in m.profile],
            }
            for m in comparison.methods
        },
        "probability_of_improvement": [
            {"x": x, "y": y, **chance._asdict()}
            for (x, y), chance in comparison.improvements.items()
        ],
        "sentences": comparison.sentences(),
    }
    return json.dumps(record, indent=1) + "\n"


def compare_csv(comparison: Comparison) -> str:
    """One line per run and task: method, run, seed, task, score."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "run", "seed", "task", "score"])
    for method in comparison.methods:
        for run, row in zip(method.runs, method.scores.tolist(), strict=True):
            writer.writerows(
                [method.label, run.name, run.seed, *found]
                for found in zip(comparison.tasks, row, strict=True)
            )
    return out.getvalue()


def compare_latex(comparison: Comparison) -> str:
    """A `tabular` for the package booktabs: mean and standard error over seeds, interquartile mean
    with its interval.
    """
    header, *rows = _scores(comparison, r"${:.3f} \pm {:.3f}$")
    rows = [
        [name.translate(_LATEX) for name in header],
        *([row[0].translate(_LATEX), *row[1:]] for row in rows),
    ]
    first, *lines = [f"{' & '.join(row)} \\\\" for row in rows]
    columns = "r" * (len(header) - 1)
    body = "\n".join(lines)
    top = f"\\begin{{tabular}}{{l{columns}}}\n\\toprule\n{first}\n\\midrule\n"
    return f"{top}{body}\n\\bottomrule\n\\end{{tabular}}\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append(f"<tr>{''.join(f'<{tag}>{safe_text(cell)}</{tag}>' for cell in row)}</tr>")
    return f'<div class="card wide"><table>{"".join(lines)}</table></div>'
