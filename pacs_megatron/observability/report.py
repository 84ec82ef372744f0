"""Writes `report.html`, a self-contained page about a run, from the files of the run folder."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import DataError
from pacs_megatron.objectives.registry import REGISTRY
from pacs_megatron.observability.charts import MEANS_FROM, Chart, Series, format_number, line_chart
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_files
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, REPORT_FILE

Rows = Sequence[Mapping[str, Any]]

_MAX_TEXT = 6000
"""Maximum characters of one prompt or response in the report; the whole text is in rollouts/."""
_REST = "Other metrics"
"""Collapsed section of the keys that no chart above shows."""
_SHOWN = (
    "id",
    "prompt",
    "response",
    "answer",
    "label",
    "reward",
    "failure",
    "stop",
    "response_tokens",
)
_GUIDES = {
    "Learning": (
        "pacs/residual_mean",
        "reward is the share of right answers among the step's samples. pass@k is the share of "
        "held-out problems with a right answer in k draws. The distance to the label is 0.5 where "
        "ψ = 0, so also in the first update of a step whose reference is the step-start policy. It "
        "falls below 0.5 when an update separates right from wrong answers.",
    ),
    "Optimization": (
        "pacs/residual_mean",
        "With weighting `question` the loss is log 2 = 0.693 where every ψ = 0, and falls below it "
        "when ψ has the sign of the label. Both curves are means over the updates of a step.",
    ),
    "Scores": (
        "pacs/psi_mean_pos",
        "ψ compares the log-ratio of a response to the reference with the log-ratios of its "
        "siblings. PACS classifies the label by σ(ψ), so ψ of right answers (pos) should be above "
        "0 and ψ of wrong ones (neg) below. In a group of one class ψ separates nothing. The share "
        "of such groups rises during training, and the curves return to 0.",
    ),
}
"""Section -> (metric, text that explains the section's charts in a run with this metric)"""


def write_report(run_dir: Path, *, num_samples: int = 8) -> Path:
    """Writes `<run_dir>/report.html` with up to `num_samples` samples of the first and of the last
    step.

    Reads metrics.jsonl, config.yaml, environment.json and rollouts/; the part of a missing file is
    omitted. Raises DataError if one is malformed. Returns the path of the report.
    """
    name = run_dir.resolve().name
    rows = read_metrics(run_dir)
    body = [_header(run_dir, name), _tiles(rows)]
    if not rows:
        body.append('<p class="soft">No step has been recorded yet.</p>')
    for title, charts in _sections(rows):
        grid = f'<div class="charts">{"".join(charts)}</div>'
        if title == _REST and charts:
            body.append(
                f"<details><summary><h2>{title} ({len(charts)})</h2></summary>{grid}</details>"
            )
        elif charts:
            key, text = _GUIDES.get(title, ("", ""))
            guide = (
                f'<p class="soft"><small>{safe_text(text)}</small></p>'
                if any(key in row for row in rows)
                else ""
            )
            body.append(f"<h2>{title}</h2>{guide}{grid}")
    if len(rows) >= MEANS_FROM:
        note = "Faint lines are single steps, strong lines means of neighbours."
        body.append(f'<p class="soft"><small>{note}</small></p>')
    files = rollout_files(run_dir) if num_samples else []
    for step, file in dict([*files[:1], *files[-1:]]).items():
        samples = [_sample(record, file) for record in _spread(read_rollouts(file), num_samples)]
        body.append(f"<h2>Answers of step {step}</h2>{''.join(samples)}")
    path = run_dir / REPORT_FILE
    write_atomically(path, [page(name, f"<main>{''.join(body)}</main>").encode()])
    return path


def _header(run_dir: Path, name: str) -> str:
    config = run_dir / CONFIG_FILE
    environment = run_dir / ENVIRONMENT_FILE
    facts = read_object(environment) if environment.exists() else {}
    versions = " · ".join(f"{key} {version}" for key, version in facts.items())
    head = f'<h1>{safe_text(name)}</h1><p class="soft"><small>{safe_text(versions)}</small></p>'
    if not config.exists():
        return head
    text = yaml.safe_dump(
        read_yaml(config, str(config)).plain(), sort_keys=False, allow_unicode=True
    )
    return f'{head}<details class="card"><summary>{CONFIG_FILE}</summary><pre>{safe_text(text)}</pre></details>'


def _tiles(rows: Rows) -> str:
    tiles = [("step", str(row["step"])) for row in rows[-1:]]
    for key in ["reward/mean", *_passes(key for row in rows for key in row)]:
        if values := [value for _, value in _points(rows, key)]:
            label = (
                "reward" if key == "reward/mean" else key.removeprefix("eval/").replace("/", " ")
            )
            ends = [values[0], values[-1]] if len(values) > 1 else values
            tiles.append((label, " → ".join(f"{value:.2f}" for value in ends)))
    if rates := [value for _, value in _points(rows, "tokens_per_s")]:
        tiles.append(("tokens/s, mean of steps", format_number(sum(rates) / len(rates))))
    if seconds := [value for _, value in _points(rows, "time/step_s")]:
        tiles.append(("time in steps", tqdm.format_interval(sum(seconds))))
    inner = "".join(
        f"<div><span>{safe_text(label)}</span><b>{safe_text(value)}</b></div>"
        for label, value in tiles
    )
    return f'<div class="tiles">{inner}</div>' if tiles else ""


def _sections(rows: Rows) -> Iterator[tuple[str, list[str]]]:
    """Yields sections with their charts; every key of the metrics is in exactly one chart."""
    left = {
        key for row in rows for key, value in row.items() if key != "step" and value is not None
    }

    def draw(
        title: str, keys: Iterable[str], note: str = "", *, may_be_log: bool = False
    ) -> list[str]:
        present = [key for key in keys if key in left]
        left.difference_update(present)
        names = _short_names(present) if len(present) > 1 else present
        series = [
            Series(name=name, points=_points(rows, key))
            for name, key in zip(names, present, strict=True)
        ]
        return (
            [line_chart(Chart(title=title, series=series, note=note, may_be_log=may_be_log))]
            if series
            else []
        )

    def all_of(prefix: str) -> list[str]:
        return [
            chart for key in sorted(left) if key.startswith(prefix) for chart in draw(key, [key])
        ]

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
    scores = draw("mean ψ by label", psi) + draw("shares", shares)
    yield "Scores", scores + [chart for name in sorted(REGISTRY) for chart in all_of(f"{name}/")]
    values = ["critic/value_mean", "critic/return_mean"]
    yield "Critic", draw("values and returns", values, "mean over tokens") + all_of("critic/")
    yield "Time", _phases(rows, left) + draw("tokens/s", ["tokens_per_s"])
    yield _REST, all_of("")


def _pass_charts(rows: Rows, left: set[str]) -> list[str]:
    """Returns one chart per benchmark with one curve per k and the standard error as a band."""
    charts = []
    for benchmark, keys in itertools.groupby(_passes(left), key=lambda key: key.rpartition("/")[0]):
        series = []
        for key in keys:
            points = _points(rows, key)
            errors = dict(_points(rows, f"{key}_se"))
            width = (
                [errors[step] for step, _ in points]
                if all(step in errors for step, _ in points)
                else None
            )
            series.append(Series(name=key.rpartition("/")[2], points=points, half_width=width))
            left.difference_update({key, f"{key}_se"})
        title = benchmark.removeprefix("eval/")
        charts.append(line_chart(Chart(title=title, series=series, note="pass@k ± standard error")))
    return charts


def _phases(rows: Rows, left: set[str]) -> list[str]:
    """Returns the chart of the time of a step: the outermost spans, and the time outside all spans."""
    timed = [row for row in rows if row.get("time/step_s") is not None]
    if not timed:
        return []
    phases = {
        key for row in timed for key in row if key.startswith("time/") and key.count("/") == 1
    }
    left -= phases
    # A phase that a step lacks did not run in it.
    seconds = {key: np.array([row.get(key) or 0.0 for row in timed]) for key in sorted(phases)}
    total = seconds.pop("time/step_s")
    curves = {
        key.removeprefix("time/").removesuffix("_s"): values for key, values in seconds.items()
    }
    curves["other"] = np.maximum(total - sum(seconds.values(), np.zeros(len(timed))), 0.0)
    steps = [row["step"] for row in timed]
    longest = sorted(curves, key=lambda name: -sum(curves[name].tolist()))
    series = [
        Series(name=name, points=list(zip(steps, curves[name].tolist(), strict=True)))
        for name in longest
    ]
    return [line_chart(Chart(title="time of each phase", series=series, note="seconds a step"))]


def _short_names(keys: Sequence[str]) -> list[str]:
    """Returns the last parts of the keys without the words that all begin with."""
    names = [key.rpartition("/")[2] for key in keys]
    stem = os.path.commonprefix(names)
    return [name[stem.rfind("_") + 1 :] for name in names]


def _passes(keys: Iterable[str]) -> list[str]:
    """`eval/<benchmark>/pass@k` among the keys, by benchmark and k."""
    found = {key: key.rpartition("/pass@") for key in keys if key.startswith("eval/")}
    passes = {
        key: (benchmark, int(k))
        for key, (benchmark, _, k) in found.items()
        if benchmark and k.isdecimal()
    }
    return sorted(passes, key=lambda key: passes[key])


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    return [(row["step"], float(value)) for row in rows if (value := row.get(key)) is not None]


def _spread(records: Sequence[dict[str, Any]], wanted: int) -> list[dict[str, Any]]:
    """Returns records at even distances, so that several prompts appear. Deterministic."""
    if len(records) <= wanted:
        return list(records)
    # Plus a changing offset; otherwise every choice would be the first sample of its group.
    return [
        records[(index * len(records)) // wanted + index % (len(records) // wanted)]
        for index in range(wanted)
    ]


def _sample(record: Mapping[str, Any], path: Path) -> str:
    if missing := sorted(set(_SHOWN) - set(record)):
        raise DataError(f"{path}: a sample lacks {', '.join(missing)}; restore or delete the file")
    kind, word = ("right", "✓ correct") if record["label"] else ("wrong", "✗ wrong")
    if record["failure"] is not None:
        kind = "wrong"
        word = f"not judged: {safe_text(str(record['failure']))}"
    elif record["label"] is None:
        kind = ""
        word = "no label"
    facts = f"reward {record['reward']} · {record['response_tokens']} tokens · {record['stop']}"
    texts = {
        "Prompt": record["prompt"],
        "Response": record["response"],
        "Gold answer": record["answer"],
    }
    return (
        '<details class="card sample"><summary><span '
        f'class="{f"verdict {kind}".strip()}">{word}</span><span '
        f'class="id">{safe_text(str(record["id"]))}</span><span '
        f'class="soft">{safe_text(facts)}</span></summary>'
        + "".join(f"<h3>{title}</h3><pre>{_cut(str(text))}</pre>" for title, text in texts.items())
        + "</details>"
    )


def _cut(text: str) -> str:
    half = _MAX_TEXT // 2
    if len(text) > _MAX_TEXT:
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return safe_text(text)
