"""The outputs of `compare`: a self-contained page, JSON, CSV and a LaTeX table."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pacs_megatron.evaluation.compare import THRESHOLDS, Comparison, Method, Run
from pacs_megatron.evaluation.statistics import Interval
from pacs_megatron.observability.charts import Chart, Series, line_chart
from pacs_megatron.observability.page import page, safe_text

_CURVES = (
    ("reward/mean", "reward", "mean over samples"),
    ("policy/entropy", "entropy", "nats a token"),
    ("optimizer/grad_norm", "gradient norm", "before clipping"),
    ("response/len_mean", "response length", "tokens"),
)
_Places = dict[int, list[tuple[float, float]]]
"""Step or k -> (place on the x axis, value) of each run that has it"""
_LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\~{}", "^": r"\^{}"})


def compare_html(comparison: Comparison) -> str:
    """The page."""
    verdicts = "".join(f"<p>{safe_text(sentence)}</p>" for sentence in comparison.sentences())
    names = [method.label for method in comparison.methods]
    differ = _table(
        ["key", *names],
        [
            [key, *("–" if value is None else str(value) for value in given)]
            for key, given in comparison.differences.items()
        ],
    )
    parts = [
        f"<h1>{safe_text(' · '.join(names))}</h1>",
        f'<p class="soft"><small>Score: final pass@1 of {safe_text(", ".join(comparison.tasks))}. Brackets are 95 % intervals '
        "by stratified bootstrap over seeds; bands are the standard error over seeds.</small></p>",
        f'<div class="card">{verdicts or "<p>One method: nothing to compare.</p>"}</div>',
        f"<h2>Scores</h2>{_table(*_scores(comparison))}",
        f"<h2>What differs</h2>{differ}" if comparison.differences else "",
    ]
    for title, charts in _sections(comparison):
        if charts:
            parts.append(f'<h2>{title}</h2><div class="charts">{"".join(charts)}</div>')
    return page(f"Comparison: {' · '.join(names)}", f"<main>{''.join(parts)}</main>")


def _scores(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    header = ["method", "seeds", *comparison.tasks, "interquartile mean"]
    return header, [
        [method.label, str(len(method.runs)), *_task_cells(method), _interval(method.iqm)]
        for method in comparison.methods
    ]


def _task_cells(method: Method, plus_minus: str = " ± ") -> list[str]:
    errors = _standard_error(method.scores)
    return [f"{m:.3f}{plus_minus}{e:.3f}" for m, e in zip(method.scores.mean(axis=0), errors, strict=True)]


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Over the first axis; zeros for one row."""
    count = len(values)
    error: np.ndarray = values.std(axis=0, ddof=1) / math.sqrt(count) if count > 1 else np.zeros(values.shape[1])
    return error


def _sections(comparison: Comparison) -> list[tuple[str, list[str]]]:
    methods = comparison.methods
    evals = [(f"eval/{task}/pass@1", task, "pass@1") for task in comparison.tasks]
    learning = [_curves(methods, key, title, note) for key, title, note in (*evals, *_CURVES[:1])]
    by_cost = [
        _curves(methods, key, f"{title} by {name}", note, cost, name)
        for key, title, note in (*evals, *_CURVES[:1])[:4]
        for name, cost in (("seconds", _seconds), ("tokens", _tokens))
    ]
    passes = [_pass_at_k(methods, task) for task in comparison.tasks]
    passes = [chart for chart in passes if any(len(series.points) > 1 for series in chart.series)]
    profile = [
        Series(name=m.label, points=[(round(100 * t), v) for t, v in zip(THRESHOLDS, m.profile, strict=True)])
        for m in methods
    ]
    profiles = Chart(
        title="performance profile", series=profile, note="share of runs and tasks above the score", x="score %"
    )
    rest = [_curves(methods, key, title, note) for key, title, note in _CURVES[1:]]
    sections = [("Learning", learning), ("pass@k", passes), ("Wall-clock and tokens", by_cost), ("Training", rest)]
    found = [(title, [line_chart(chart) for chart in charts if chart.series]) for title, charts in sections]
    return [*found, ("Profiles", [line_chart(profiles)])]


def _curves(
    methods: Sequence[Method], key: str, title: str, note: str, cost: Callable[[Run], list[float]] | None = None,
    x: str = "step",
) -> Chart:  # fmt: skip
    """Mean over the seeds that have the step, and its standard error; `cost` gives the place of each row on the x axis."""
    series = []
    for method in methods:
        at: _Places = {}
        for run in method.runs:
            costs = [float(row["step"] or 0) for row in run.rows] if cost is None else cost(run)
            for row, place in zip(run.rows, costs, strict=True):
                if row.get(key) is not None:
                    at.setdefault(int(row["step"] or 0), []).append((place, float(row[key] or 0.0)))
        series += _series(method, at)
    return Chart(title=title, series=series, note=note, x=x)


def _series(method: Method, at: _Places) -> list[Series]:
    pairs = [np.array(found) for _, found in sorted(at.items())]
    points = [(round(p[:, 0].mean()), float(p[:, 1].mean())) for p in pairs]
    return [Series(name=method.label, points=points, half_width=[float(_standard_error(p)[1]) for p in pairs])][
        : len(at)
    ]


def _seconds(run: Run) -> list[float]:
    return [float(value) for value in np.cumsum([row.get("time/step_s") or 0.0 for row in run.rows])]


def _tokens(run: Run) -> list[float]:
    used = [(row.get("tokens_per_s") or 0.0) * (row.get("time/step_s") or 0.0) for row in run.rows]
    return [float(value) for value in np.cumsum(used)]


def _pass_at_k(methods: Sequence[Method], task: str) -> Chart:
    """pass@k over k at the end of the runs, or of their evaluations."""
    series, prefix = [], f"eval/{task}/pass@"
    for method in methods:
        at: _Places = {}
        for run in method.runs:
            for key, value in {
                **{k: v for row in run.rows for k, v in row.items() if v is not None},
                **run.results,
            }.items():
                k = key.removeprefix(prefix)
                if key.startswith(prefix) and k.isdecimal():
                    at.setdefault(int(k), []).append((int(k), float(value)))
        series += _series(method, at)
    return Chart(title=task, series=series, note="pass@k", x="k")


def compare_json(comparison: Comparison) -> str:
    """All figures of the page but the curves."""
    record: dict[str, Any] = {
        "tasks": comparison.tasks,
        "differences": comparison.differences,
        "methods": {
            m.label: {
                "runs": [run.name for run in m.runs],
                "seeds": [run.seed for run in m.runs],
                "scores": m.scores.tolist(),
                "interquartile_mean": m.iqm._asdict(),
                "performance_profile": list(m.profile),
            }
            for m in comparison.methods
        },
        "probability_of_improvement": [
            {"x": x, "y": y, **chance._asdict()} for (x, y), chance in comparison.improvements.items()
        ],
        "sentences": comparison.sentences(),
    }
    return json.dumps(record, indent=1) + "\n"


def compare_csv(comparison: Comparison) -> str:
    """One line a run and task: method, run, seed, task, score."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "run", "seed", "task", "score"])
    for method in comparison.methods:
        for run, row in zip(method.runs, method.scores.tolist(), strict=True):
            writer.writerows(
                [method.label, run.name, run.seed, *found] for found in zip(comparison.tasks, row, strict=True)
            )
    return out.getvalue()


def compare_latex(comparison: Comparison) -> str:
    """A `tabular` for the package booktabs: mean and standard error over seeds, interquartile mean with its interval."""
    header, _ = _scores(comparison)
    rows = [
        [m.label.translate(_LATEX), str(len(m.runs)), *(f"${c}$" for c in _task_cells(m, r" \pm ")), _interval(m.iqm)]
        for m in comparison.methods
    ]
    first, *lines = [f"{' & '.join(row)} \\\\" for row in [[name.translate(_LATEX) for name in header], *rows]]
    columns, body = "r" * (len(header) - 1), "\n".join(lines)
    top = f"\\begin{{tabular}}{{l{columns}}}\n\\toprule\n{first}\n\\midrule\n"
    return f"{top}{body}\n\\bottomrule\n\\end{{tabular}}\n"


def _interval(found: Interval) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{safe_text(cell)}</{tag}>' for cell in cells)}</tr>"

    return f'<div class="card wide"><table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table></div>'
