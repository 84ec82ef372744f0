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
from pacs_megatron.observability.metric_words import words_of
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.observability.rank_times import read_rank_times, waits_of
from pacs_megatron.observability.rollout_log import line_offsets, read_rollouts, rollout_files
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, REPORT_FILE

Rows = Sequence[Mapping[str, Any]]
"""The rows of metrics.jsonl"""

_MAX_TEXT = 6000
"""Maximum characters of one prompt or response in the report; the whole text is in rollouts/."""
_OTHER = "Other metrics"
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
"""Fields of a sample in the report"""
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
    """Writes `<run_dir>/report.html` and returns its path.

    Reads metrics.jsonl, config.yaml, environment.json, profile/rank_times.jsonl and rollouts/; the
    part of a missing file is omitted.

    Args:
        run_dir: The run folder.
        num_samples: Maximum number of samples of the first and of the last step.

    Raises:
        DataError: A file is malformed.
    """
    name = run_dir.resolve().name
    rows = read_metrics(run_dir)
    parts = [_header(run_dir, name), _tiles(rows)]
    if not rows:
        parts.append('<p class="soft">No step has been recorded yet.</p>')
    for title, charts in _sections(rows):
        if charts:
            parts.append(_section(title, charts, rows))
    parts.append(_rank_waits(read_rank_times(run_dir)))
    if len(rows) >= MEANS_FROM:
        note = "Faint lines are single steps, strong lines their moving mean."
        parts.append(f'<p class="soft"><small>{note}</small></p>')
    if num_samples:
        parts += _answers(run_dir, num_samples)

    path = run_dir / REPORT_FILE
    write_atomically(path, [page(name, f"<main>{''.join(parts)}</main>").encode()])
    return path


def _header(run_dir: Path, name: str) -> str:
    """Name of the run, versions of the software, configuration."""
    environment = run_dir / ENVIRONMENT_FILE
    record = read_object(environment) if environment.exists() else {}
    versions = " · ".join(f"{key} {version}" for key, version in record.items())
    head = f'<h1>{safe_text(name)}</h1><p class="soft"><small>{safe_text(versions)}</small></p>'

    config = run_dir / CONFIG_FILE
    if not config.exists():
        return head
    values = read_yaml(config, str(config)).plain()
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return (
        f'{head}<details class="card"><summary>{CONFIG_FILE}</summary>'
        f"<pre>{safe_text(text)}</pre></details>"
    )


def _tiles(rows: Rows) -> str:
    """The last results of the run in large figures."""
    if not rows:
        return ""
    tiles = [("step", str(rows[-1]["step"]))]

    all_keys: set[str] = set()
    for row in rows:
        all_keys.update(row)
    for key in ["reward/mean", *_pass_keys(all_keys)]:
        values = _values(rows, key)
        if values:
            label = words_of(key).title
            ends = _window_means(values)
            if key == "reward/mean" and len(ends) > 1:
                label = f"{label}, mean of {_window_of(values)} steps"
            tiles.append((label, " → ".join(f"{value:.2f}" for value in ends)))

    rates = _values(rows, "tokens_per_s")
    if rates:
        tiles.append(("tokens/s, mean of steps", format_number(sum(rates) / len(rates))))
    seconds = _values(rows, "time/step_s")
    if seconds:
        tiles.append(("time in steps", tqdm.format_interval(sum(seconds))))

    cells = [
        f"<div><span>{safe_text(label)}</span><b>{safe_text(value)}</b></div>"
        for label, value in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _window_of(values: Sequence[float]) -> int:
    """Steps of a tile's mean at each end: a tenth of the steps, at most 20."""
    return max(1, min(20, len(values) // 10))


def _window_means(values: Sequence[float]) -> list[float]:
    """The means of the first and of the last values, over a window; one value alone stays."""
    if len(values) < 2:
        return list(values)
    window = _window_of(values)
    return [sum(values[:window]) / window, sum(values[-window:]) / window]


def _section(title: str, charts: Sequence[str], rows: Rows) -> str:
    """Heading, explanation and charts; the other metrics are collapsed."""
    grid = f'<div class="charts">{"".join(charts)}</div>'
    if title == _OTHER:
        return f"<details><summary><h2>{title} ({len(charts)})</h2></summary>{grid}</details>"

    guide = ""
    key, text = _GUIDES.get(title, ("", ""))
    if any(key in row for row in rows):
        guide = f'<p class="soft"><small>{safe_text(text)}</small></p>'
    return f"<h2>{title}</h2>{guide}{grid}"


def _sections(rows: Rows) -> Iterator[tuple[str, list[str]]]:
    """Yields sections with their charts; every key of the metrics is in exactly one chart."""
    charts = _Charts(rows)
    yield (
        "Learning",
        charts.draw_key("reward/mean")
        + charts.draw_pass_rates()
        + charts.draw_key("pacs/residual_mean"),
    )
    yield (
        "Optimization",
        charts.draw_key("objective/loss")
        + charts.draw_key("optimizer/grad_norm", may_be_log=True)
        + charts.draw_key("policy/entropy"),
    )
    yield (
        "Responses",
        charts.draw("response length", charts.keys("response/len_"), "tokens")
        + charts.draw_each("response/"),
    )

    psi = ["pacs/psi_mean_pos", "pacs/psi_mean_neg"]
    shares = ["pacs/one_class_group_frac", "pacs/truncated_frac", "pacs/psi_over_8_frac"]
    scores = charts.draw("mean ψ by label", psi) + charts.draw("shares", shares)
    for objective in sorted(REGISTRY):
        scores += charts.draw_each(f"{objective}/")
    yield "Scores", scores

    values = ["critic/value_mean", "critic/return_mean"]
    yield (
        "Critic",
        charts.draw("values and returns", values, "mean over tokens") + charts.draw_each("critic/"),
    )
    yield (
        "Time",
        charts.draw_phases()
        + charts.draw_key("tokens_per_s")
        + charts.draw_each("speed/tokens_per_s_per_gpu")
        + charts.draw_each("speed/tflops_per_gpu")
        + charts.draw("MFU", ["speed/mfu", "speed/step_mfu"], "share of the bf16 peak"),
    )
    yield _OTHER, charts.draw_each("")


def _rank_waits(rows: Rows) -> str:
    """The table of who waits for whom; empty without step times."""
    if not rows:
        return ""
    header = ("phase", "s a step", "the others wait for", "its work, s", "their wait, s")
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in header)}</tr>"]
    for wait in waits_of(rows):
        slowest = "servers and rewards"
        if wait.slowest is not None:
            slowest = f"rank {wait.slowest} ({100 * wait.slowest_frac:.0f} % of the steps)"
        numbers = [format_number(value) for value in (wait.seconds, wait.work_s, wait.wait_s)]
        cells = [wait.phase, numbers[0], slowest, *numbers[1:]]
        lines.append(f"<tr>{''.join(f'<td>{safe_text(cell)}</td>' for cell in cells)}</tr>")

    num_ranks = len(rows[-1]["ranks"])
    guide = (
        f"Means over {len(rows)} steps of {num_ranks} ranks. A rank works in a phase except in the "
        "reduction of gradients, and of sampling only in its own generation. In each phase the "
        "ranks wait for the one that works longest."
    )
    return (
        f'<h2>Ranks</h2><p class="soft"><small>{guide}</small></p>'
        f'<div class="card wide"><table>{"".join(lines)}</table></div>'
    )


class _Charts:
    """Draws charts of metrics, each key in one chart."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._undrawn: set[str] = set()
        """Keys with a value that no chart shows yet"""
        for row in rows:
            self._undrawn.update(key for key, value in row.items() if value is not None)
        self._undrawn.discard("step")

    def keys(self, prefix: str) -> list[str]:
        """The keys that no chart shows yet."""
        return sorted(key for key in self._undrawn if key.startswith(prefix))

    def draw(self, title: str, keys: Iterable[str], note: str = "") -> list[str]:
        """One chart with those of `keys` that no chart shows yet.

        Args:
            title: Title of the chart, if it has several curves.
            keys: Keys of the metrics, each one a curve.
            note: Unit or denominator, beside the title.

        Returns:
            The chart, or an empty list if there is no such key.
        """
        present = [key for key in keys if key in self._undrawn]
        if len(present) == 1:
            return self.draw_key(present[0])
        if not present:
            return []
        self._undrawn.difference_update(present)

        series = [
            Series(name=name, points=_points(self._rows, key))
            for name, key in zip(_short_names(present), present, strict=True)
        ]
        return [line_chart(Chart(title=title, series=series, note=note, keys=", ".join(present)))]

    def draw_key(self, key: str, *, may_be_log: bool = False) -> list[str]:
        """The chart of one metric; an empty list if it has no value, or a chart shows it already.

        Args:
            key: Key of the metric.
            may_be_log: The axis may be logarithmic.
        """
        if key not in self._undrawn:
            return []
        self._undrawn.remove(key)
        title, unit = words_of(key)
        series = [Series(name=title, points=_points(self._rows, key))]
        chart = Chart(title=title, series=series, note=unit, keys=key, may_be_log=may_be_log)
        return [line_chart(chart)]

    def draw_each(self, prefix: str) -> list[str]:
        """A chart of each key with this prefix that no chart shows yet."""
        charts: list[str] = []
        for key in self.keys(prefix):
            charts += self.draw_key(key)
        return charts

    def draw_pass_rates(self) -> list[str]:
        """One chart per benchmark with one curve per k and the standard error as a band."""
        charts = []
        keys = _pass_keys(self._undrawn)
        for benchmark, group in itertools.groupby(keys, key=_benchmark_of):
            series = [self._pass_rate(key) for key in group]
            title = benchmark.removeprefix("eval/")
            shown = f"{benchmark}/pass@k"
            chart = Chart(title=title, series=series, note="pass@k ± standard error", keys=shown)
            charts.append(line_chart(chart))
        return charts

    def _pass_rate(self, key: str) -> Series:
        """The curve of one k, with a band if every point has a standard error."""
        error_key = f"{key}_se"
        self._undrawn.difference_update({key, error_key})

        points = _points(self._rows, key)
        errors = dict(_points(self._rows, error_key))
        half_width = None
        if all(step in errors for step, _ in points):
            half_width = [errors[step] for step, _ in points]
        return Series(name=key.rpartition("/")[2], points=points, half_width=half_width)

    def draw_phases(self) -> list[str]:
        """The chart of the time of a step: the outermost spans, and the time outside all spans."""
        rows = [row for row in self._rows if row.get("time/step_s") is not None]
        if not rows:
            return []
        keys: set[str] = set()
        for row in rows:
            keys.update(key for key in row if key.startswith("time/"))
        phases = {key for key in keys if key.count("/") == 1}
        self._undrawn -= phases

        # A phase that a step lacks did not run in it.
        seconds = {key: np.array([row.get(key) or 0.0 for row in rows]) for key in sorted(phases)}
        total = seconds.pop("time/step_s")
        curves = {
            key.removeprefix("time/").removesuffix("_s"): values for key, values in seconds.items()
        }
        in_phases = sum(seconds.values(), np.zeros(len(rows)))
        curves["other"] = np.maximum(total - in_phases, 0.0)

        steps = [row["step"] for row in rows]
        longest_first = sorted(curves, key=lambda name: -sum(curves[name].tolist()))
        series = [
            Series(name=name, points=list(zip(steps, curves[name].tolist(), strict=True)))
            for name in longest_first
        ]
        chart = Chart(
            title="time of each phase",
            series=series,
            note="seconds a step",
            keys="time/<phase>_s",
            is_stacked=True,
        )
        return [line_chart(chart)]


def _short_names(keys: Sequence[str]) -> list[str]:
    """Returns the last parts of the keys without the words that all begin with."""
    names = [key.rpartition("/")[2] for key in keys]
    stem = os.path.commonprefix(names)  # noqa: RUF071  (names, not paths)
    return [name[stem.rfind("_") + 1 :] for name in names]


def _pass_keys(keys: Iterable[str]) -> list[str]:
    """`eval/<benchmark>/pass@k` among the keys, by benchmark and k."""
    order = {}
    for key in keys:
        benchmark, _, k = key.rpartition("/pass@")
        is_pass_rate = bool(benchmark) and k.isdecimal()
        if key.startswith("eval/") and is_pass_rate:
            order[key] = (benchmark, int(k))
    return sorted(order, key=lambda key: order[key])


def _benchmark_of(key: str) -> str:
    """`eval/<benchmark>` of `eval/<benchmark>/pass@k`."""
    return key.rpartition("/")[0]


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have a value."""
    return [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]


def _values(rows: Rows, key: str) -> list[float]:
    """The values of the rows that have one."""
    return [value for _, value in _points(rows, key)]


def _answers(run_dir: Path, num_samples: int) -> list[str]:
    """Samples of the first and of the last step."""
    files = rollout_files(run_dir)
    parts = []
    for step, file in dict([*files[:1], *files[-1:]]).items():
        rows = _spread(len(line_offsets(file)) - 1, num_samples)
        samples = [_sample(record, file) for record in read_rollouts(file, rows)]
        parts.append(f"<h2>Answers of step {step}</h2>{''.join(samples)}")
    return parts


def _spread(num_lines: int, num_samples: int) -> list[int]:
    """Numbers of lines at even distances, so that several prompts appear. Deterministic.

    Args:
        num_lines: The samples of a step, those of a prompt next to each other.
        num_samples: Maximum number of lines.
    """
    if num_lines <= num_samples:
        return list(range(num_lines))
    distance = num_lines // num_samples
    # Plus a changing offset; otherwise every choice would be the first sample of its group.
    return [(index * num_lines) // num_samples + index % distance for index in range(num_samples)]


def _sample(record: Mapping[str, Any], path: Path) -> str:
    """One sample of the file `path`: its verdict, and its texts below."""
    missing = sorted(set(_SHOWN) - set(record))
    if missing:
        raise DataError(f"{path}: a sample lacks {', '.join(missing)}; restore or delete the file")

    style, verdict = _verdict(record)
    facts = f"reward {record['reward']} · {record['response_tokens']} tokens · {record['stop']}"
    texts = {
        "Prompt": record["prompt"],
        "Response": record["response"],
        "Gold answer": record["answer"],
    }
    details = record.get("reward_details")
    if isinstance(details, dict) and {"gold", "answer"} <= details.keys():
        texts["Read as"] = f"gold: {details['gold']}\nanswer: {details['answer']}"
    blocks = [
        f"<h3>{title}</h3><pre>{_shortened(str(text))}</pre>" for title, text in texts.items()
    ]
    blocks += [_turn(turn) for turn in record.get("turns", [])]
    return (
        f'<details class="card sample"><summary><span class="{style}">{verdict}</span>'
        f'<span class="id">{safe_text(str(record["id"]))}</span><span '
        f'class="soft">{safe_text(facts)}</span></summary>{"".join(blocks)}</details>'
    )


def _turn(turn: Mapping[str, Any]) -> str:
    """One turn of an agent, folded; text that the policy did not write is marked."""
    if turn["role"] == "assistant":
        calls = turn["calls"]
        facts = [f"{call['tool']}: {call['failure'] or 'done'}" for call in calls]
        title = " · ".join(["policy", *facts])
        style = "turn"
    else:
        title = "environment, not trained"
        style = "turn environment"
    return (
        f'<details class="{style}"><summary class="soft">{safe_text(title)}</summary>'
        f"<pre>{_shortened(turn['text'])}</pre></details>"
    )


def _verdict(record: Mapping[str, Any]) -> tuple[str, str]:
    """(style classes, text) of a sample's verdict."""
    if record["failure"] is not None:
        return "verdict wrong", f"not judged: {safe_text(str(record['failure']))}"
    if record["label"] is None:
        return "verdict", "no label"
    if record["label"]:
        return "verdict right", "✓ correct"
    return "verdict wrong", "✗ wrong"


def _shortened(text: str) -> str:
    """The text for HTML, without its middle if it is long."""
    half = _MAX_TEXT // 2
    if len(text) > _MAX_TEXT:
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return safe_text(text)
