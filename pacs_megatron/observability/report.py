"""`report.html`: one self-contained file that shows a run, made from the run folder alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import DataError
from pacs_megatron.objectives.registry import REGISTRY
from pacs_megatron.observability.charts import MEANS_FROM, Chart, Series, format_number, line_chart
from pacs_megatron.observability.metrics import Row, read_metrics
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_files
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, REPORT_FILE

_MAX_TEXT = 6000
"""Maximum characters of one prompt or response in the report; the whole text is in rollouts/."""

_REST = "Other metrics"
"""Collapsed section of the keys that no chart above shows."""

_GUIDES = {
    "Learning": (
        "pacs/residual_mean",
        "reward is the share of right answers among the step's samples. pass@k is the share of held-out problems with a "
        "right answer in k draws. The distance to the label is 0.5 where ψ = 0, so also in the first update of a step whose "
        "reference is the step's own start. It falls below 0.5 when an update separates right from wrong answers.",
    ),
    "Optimization": (
        "pacs/residual_mean",
        "With weighting `question` the loss is log 2 = 0.693 where every ψ = 0, and falls below it when ψ has the sign of "
        "the label. Both curves are means over the updates of a step.",
    ),
    "Scores": (
        "pacs/psi_mean_pos",
        "ψ compares the log-ratio of a response to the reference with the log-ratios of its siblings. PACS classifies the "
        "label by σ(ψ), so ψ of right answers (pos) should lie above 0 and ψ of wrong ones (neg) below. A group of one class "
        "has nothing to separate; their share rises as the policy learns, and the curves return to 0.",
    ),
}
"""Section -> a metric, and how to read the section's charts in a run that has this metric."""


def write_report(run_dir: Path, *, num_samples: int) -> Path:
    """Writes `<run_dir>/report.html` with up to `num_samples` samples of the first and of the last step.

    Reads metrics.jsonl, config.yaml, environment.json and rollouts/; the part of a missing file is omitted. Raises
    DataError if one is malformed. Returns the path of the report.
    """
    name, rows = run_dir.resolve().name, read_metrics(run_dir)
    body = [_header(run_dir, name), _tiles(rows)]
    if not rows:
        body.append('<p class="soft">No step has been recorded yet.</p>')
    for title, charts in _sections(rows):
        grid = f'<div class="charts">{"".join(charts)}</div>'
        if title == _REST and charts:
            body.append(f"<details><summary><h2>{title} ({len(charts)})</h2></summary>{grid}</details>")
        elif charts:
            body.append(f"<h2>{title}</h2>{_guide(title, rows)}{grid}")
    if len(rows) >= MEANS_FROM:
        body.append(
            '<p class="soft"><small>Faint lines are single steps, strong lines means of neighbours.</small></p>'
        )
    body.append(_samples(run_dir, num_samples))
    path = run_dir / REPORT_FILE
    write_atomically(path, [page(name, f"<main>{''.join(body)}</main>").encode()])
    return path


# ------------------------------------------------------------------------------------------------------------- header
def _header(run_dir: Path, name: str) -> str:
    config, environment = run_dir / CONFIG_FILE, run_dir / ENVIRONMENT_FILE
    facts = read_object(environment) if environment.exists() else {}
    versions = " · ".join(f"{key} {version}" for key, version in facts.items())
    head = f'<h1>{safe_text(name)}</h1><p class="soft"><small>{safe_text(versions)}</small></p>'
    if not config.exists():
        return head
    text = yaml.safe_dump(read_yaml(config, str(config)).plain(), sort_keys=False, allow_unicode=True)
    return f'{head}<details class="card"><summary>{CONFIG_FILE}</summary><pre>{safe_text(text)}</pre></details>'


def _tiles(rows: Sequence[Row]) -> str:
    tiles = []
    if rows:
        tiles.append(("step", str(rows[-1]["step"])))
    passes = _matching(rows, lambda key: key.startswith("eval/") and _is_pass(key))
    for key in ["reward/mean", *sorted(passes, key=lambda key: (key.rpartition("/")[0], _k_of(key)))]:
        points = _points(rows, key)
        if points:
            label = "reward" if key == "reward/mean" else key.removeprefix("eval/").replace("/", " ")
            ends = [f"{points[0][1]:.2f}", f"{points[-1][1]:.2f}"] if len(points) > 1 else [f"{points[0][1]:.2f}"]
            tiles.append((label, " → ".join(ends)))
    rates = _points(rows, "tokens_per_s")
    if rates:
        tiles.append(("tokens/s, mean of steps", format_number(sum(value for _, value in rates) / len(rates))))
    seconds = _points(rows, "time/step_s")
    if seconds:
        tiles.append(("time in steps", tqdm.format_interval(sum(value for _, value in seconds))))
    inner = "".join(f"<div><span>{safe_text(label)}</span><b>{safe_text(value)}</b></div>" for label, value in tiles)
    return f'<div class="tiles">{inner}</div>' if tiles else ""


# ------------------------------------------------------------------------------------------------------------- charts
def _guide(section: str, rows: Sequence[Row]) -> str:
    key, text = _GUIDES.get(section, ("", ""))
    return f'<p class="soft"><small>{safe_text(text)}</small></p>' if any(key in row for row in rows) else ""


def _sections(rows: Sequence[Row]) -> Iterable[tuple[str, list[str]]]:
    """Yields sections with their charts; every key of the metrics is in exactly one chart."""
    left = {key for row in rows for key, value in row.items() if key != "step" and value is not None}

    def draw(title: str, keys: Iterable[str], note: str = "", *, may_be_log: bool = False) -> list[str]:
        present = [key for key in keys if key in left]
        left.difference_update(present)
        if not present:
            return []
        series = [Series(name=key, points=_points(rows, key)) for key in present]
        if len(series) > 1:
            series = [Series(name=name, points=s.points) for name, s in zip(_short_names(present), series, strict=True)]
        return [line_chart(Chart(title=title, series=series, note=note, may_be_log=may_be_log))]

    def all_of(prefix: str) -> list[str]:
        return [chart for key in sorted(left) if key.startswith(prefix) for chart in draw(key, [key])]

    yield (
        "Learning",
        draw("reward", ["reward/mean"], "mean over samples")
        + _pass_charts(rows, left)
        + draw("distance to the label", ["pacs/residual_mean"], "mean |σ(ψ) − y|"),
    )
    yield (
        "Optimization",
        draw("loss", ["objective/loss"], "objective of the mini-batches")
        + draw("gradient norm", ["optimizer/grad_norm"], "before clipping", may_be_log=True)
        + draw("entropy", ["policy/entropy"], "nats a token"),
    )
    lengths = [key for key in sorted(left) if key.startswith("response/len_")]
    yield "Responses", draw("response length", lengths, "tokens") + all_of("response/")
    psi = ["pacs/psi_mean_pos", "pacs/psi_mean_neg"]
    shares = ["pacs/one_class_group_frac", "pacs/truncated_frac", "pacs/psi_over_8_frac"]
    yield (
        "Scores",
        draw("mean ψ by label", psi)
        + draw("shares", shares)
        + [chart for name in sorted(REGISTRY) for chart in all_of(f"{name}/")],
    )
    values = [f"critic/{name}" for name in ("value_mean", "return_mean")]
    yield "Critic", draw("values and returns", values, "mean over tokens") + all_of("critic/")
    yield "Time", _phases(rows, left) + draw("tokens/s", ["tokens_per_s"])
    yield _REST, [chart for key in sorted(left) for chart in draw(key, [key])]


def _pass_charts(rows: Sequence[Row], left: set[str]) -> list[str]:
    """Returns one chart per benchmark with one curve per k and the standard error as a band."""
    charts = []
    for benchmark in sorted({key.rpartition("/")[0] for key in left if key.startswith("eval/") and _is_pass(key)}):
        keys = sorted((key for key in left if key.startswith(f"{benchmark}/") and _is_pass(key)), key=_k_of)
        series = []
        for key in keys:
            points = _points(rows, key)
            errors = dict(_points(rows, f"{key}_se"))
            width = [errors[step] for step, _ in points] if all(step in errors for step, _ in points) else None
            series.append(Series(name=key.rpartition("/")[2], points=points, half_width=width))
        charts.append(
            line_chart(Chart(title=benchmark.removeprefix("eval/"), series=series, note="pass@k ± standard error"))
        )
        left.difference_update({*keys, *(f"{key}_se" for key in keys)})
    return charts


def _phases(rows: Sequence[Row], left: set[str]) -> list[str]:
    """Returns the chart of the time of a step: the outermost spans, and the time outside all spans."""
    timed = [row for row in rows if row.get("time/step_s") is not None]
    if not timed:
        return []
    phases = [key for key in _matching(timed, lambda key: key.startswith("time/")) if key.count("/") == 1]
    phases.remove("time/step_s")
    curves = {key.removeprefix("time/").removesuffix("_s"): [_number(row, key) for row in timed] for key in phases}
    covered = sum(map(np.array, curves.values()), np.zeros(len(timed)))
    curves["other"] = np.maximum([_number(row, "time/step_s") for row in timed] - covered, 0.0).tolist()
    left.difference_update({*phases, "time/step_s"})
    steps = [_step(row) for row in timed]
    longest = sorted(curves, key=lambda name: -sum(curves[name]))
    series = [Series(name=name, points=list(zip(steps, curves[name], strict=True))) for name in longest]
    return [line_chart(Chart(title="time of each phase", series=series, note="seconds a step"))]


def _short_names(keys: Sequence[str]) -> list[str]:
    """Returns the last parts of the keys without their common prefix."""
    names = [key.rpartition("/")[2] for key in keys]
    stem = names[0]
    while not all(name.startswith(stem) for name in names):
        stem = stem[:-1]
    stem = stem[: stem.rfind("_") + 1]
    return [name.removeprefix(stem) for name in names]


def _matching(rows: Sequence[Row], wanted: Callable[[str], bool]) -> list[str]:
    return sorted(key for key in {key for row in rows for key in row} if wanted(key))


def _is_pass(key: str) -> bool:
    return key.rpartition("/")[2].removeprefix("pass@").isdecimal()


def _k_of(key: str) -> int:
    return int(key.rpartition("@")[2])


def _points(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(_step(row), float(value)) for row in rows if (value := row.get(key)) is not None]


def _number(row: Row, key: str) -> float:
    return float(row.get(key) or 0.0)  # the phase did not run in this step


def _step(row: Row) -> int:
    return int(row["step"] or 0)


# ------------------------------------------------------------------------------------------------------------ samples
def _samples(run_dir: Path, num_samples: int) -> str:
    files = rollout_files(run_dir)
    if not files or num_samples == 0:
        return ""
    chosen = [files[0]] if len(files) == 1 else [files[0], files[-1]]
    parts = []
    for step, path in chosen:
        records = _spread(read_rollouts(path), num_samples)
        parts.append(f"<h2>Answers of step {step}</h2>" + "".join(_sample(record, path) for record in records))
    return "".join(parts)


def _spread(records: Sequence[dict[str, Any]], wanted: int) -> list[dict[str, Any]]:
    """Returns records at even distances, so that several prompts appear. Deterministic."""
    if len(records) <= wanted:
        return list(records)
    # Plus a changing offset; otherwise every choice would be the first sample of its group.
    return [records[(index * len(records)) // wanted + index % (len(records) // wanted)] for index in range(wanted)]


def _sample(record: Mapping[str, Any], path: Path) -> str:
    missing = {"id", "prompt", "response", "answer", "label", "reward", "failure", "stop", "response_tokens"} - set(
        record
    )
    if missing:
        raise DataError(f"{path}: a sample lacks {', '.join(sorted(missing))}; restore or delete the file")
    if record["failure"] is not None:
        verdict = f'<span class="verdict wrong">not judged: {safe_text(str(record["failure"]))}</span>'
    elif record["label"] is None:
        verdict = '<span class="verdict">no label</span>'
    else:
        kind, word = ("right", "✓ correct") if record["label"] else ("wrong", "✗ wrong")
        verdict = f'<span class="verdict {kind}">{word}</span>'
    facts = f"reward {record['reward']} · {record['response_tokens']} tokens · {record['stop']}"
    return (
        f'<details class="card sample"><summary>{verdict}<span class="id">{safe_text(str(record["id"]))}</span>'
        f'<span class="soft">{safe_text(facts)}</span></summary>'
        f"<h3>Prompt</h3><pre>{_cut(record['prompt'])}</pre>"
        f"<h3>Response</h3><pre>{_cut(record['response'])}</pre>"
        f"<h3>Gold answer</h3><pre>{_cut(record['answer'])}</pre></details>"
    )


def _cut(text: Any) -> str:
    text = str(text)
    if len(text) <= _MAX_TEXT:
        return safe_text(text)
    half = _MAX_TEXT // 2
    return safe_text(text[:half] + f"\n… {len(text) - 2 * half} characters left out …\n" + text[-half:])
