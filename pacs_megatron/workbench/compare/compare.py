"""`pacs-megatron compare`: statistics of runs that differ in configuration and seed.

Runs whose configurations differ in the seed only are one method. A task is a benchmark; a score is
a run's final pass@1 on it, or its final reward without benchmarks. The aggregates are those of
`workbench/statistics.py`.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import DataError
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.runtime.files import check_distinct, is_file
from pacs_megatron.runtime.json_reader import as_object, read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, METRICS_FILE, near_run, read_changes
from pacs_megatron.workbench import statistics

THRESHOLDS = tuple(percent / 100 for percent in range(101))
MIN_SEEDS = 4
"""With fewer on both sides no difference can have p < 0.05 in a permutation of seeds."""
_SAME_METHOD = ("run.seed", "run.name", "run.dir", "run.nproc", "resources", "logging")
_IGNORED = tuple(f"{key}." for key in _SAME_METHOD)
_REWARD = "reward/mean"
_MAX_LABEL_KEYS = 3
"""Maximum number of differing keys in a label"""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run folder that are compared."""

    name: str
    seed: int
    rows: Sequence[Mapping[str, Any]]
    """the rows of metrics.jsonl"""
    config: Mapping[str, Any]
    """leaf values by dotted key"""
    results: Mapping[str, Any]
    """the metrics of <run>/eval/results.json"""
    changes: Sequence[Mapping[str, Any]]
    """options that a later attempt changed: step, key, before, after"""

    def score(self, key: str) -> float | None:
        """The value of the evaluation, else of the last step; None without either."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        last = values[-1] if values else None
        value = self.results.get(key, last)
        return None if value is None else float(value)

    def start(self, key: str) -> float:
        """The value of the first row that has one; NaN without one."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return float(values[0]) if values else float("nan")


@dataclass(frozen=True, slots=True)
class Method:
    """Runs with one configuration."""

    label: str
    runs: Sequence[Run]
    scores: np.ndarray
    """float64 [runs, tasks]"""
    starts: np.ndarray
    """float64 [runs, tasks]: the first values; NaN where a run has none"""
    iqm: statistics.Interval
    """interquartile mean"""
    profile: Sequence[statistics.Interval]
    """performance profile at THRESHOLDS"""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The methods in the order of their first runs, and every pair of them."""

    tasks: tuple[str, ...]
    differences: Mapping[str, Sequence[Any]]
    """differing key -> value of each method"""
    methods: tuple[Method, ...]
    improvements: Mapping[tuple[str, str], statistics.Interval]
    """(x, y) -> probability that a run of x has a higher score than a run of y"""

    def sentences(self) -> list[str]:
        """One sentence for each pair of methods: which is better, and whether it is significant."""
        sentences = []
        runs = itertools.chain.from_iterable(method.runs for method in self.methods)
        ends = {run.rows[-1]["step"] for run in runs}
        if len(ends) > 1:
            sentences.append(
                f"The runs end at different steps ({min(ends)} to {max(ends)}); a score is a "
                "run's last one."
            )
        sentences += self.changes()
        methods = {method.label: method for method in self.methods}
        for (x, y), chance in self.improvements.items():
            sentences.append(_verdict(methods[x], methods[y], chance))
        return sentences

    def changes(self) -> list[str]:
        """One sentence for each option that a later attempt of a run changed."""
        sentences = []
        for run in itertools.chain.from_iterable(method.runs for method in self.methods):
            for change in run.changes:
                sentences.append(
                    f"{run.name} changed {change['key']} from {change['before']} to "
                    f"{change['after']} after step {change['step']}."
                )
        return sentences


def _verdict(x: Method, y: Method, chance: statistics.Interval) -> str:
    """The sentence about two methods. `chance`: probability that a run of `x` is better."""
    num_seeds = min(len(x.runs), len(y.runs))
    if num_seeds < MIN_SEEDS:
        return (
            f"{x.label} and {y.label}: fewer than {MIN_SEEDS} seeds ({num_seeds}) cannot order "
            "them."
        )
    p = statistics.permutation_p(x.scores, y.scores)
    verdict = "significant" if p < 0.05 else "not significant"
    return (
        f"A run of {x.label} is better than one of {y.label} with probability "
        f"{chance.value:.2f} [{chance.low:.2f}, {chance.high:.2f}]. The difference in the mean "
        f"score is {verdict} (p = {p:.2g} by permutation of seeds, at least {num_seeds} seeds "
        "each)."
    )


def compare(folders: Sequence[Path]) -> RunComparison:
    """Reads the runs and compares them.

    Raises:
        DataError: no run, no common score, or a seed twice in one method.
    """
    check_distinct(folders)
    runs = [_read(folder) for folder in folders]
    tasks = _common_tasks(runs, folders)
    runs_of_methods = _by_method(runs)
    differences = _differences(runs_of_methods)

    methods = []
    labels = _labels(runs_of_methods, differences)
    for label, method_runs in zip(labels, runs_of_methods, strict=True):
        scores = np.array(
            [[run.score(task) for task in tasks] for run in method_runs], dtype=np.float64
        )
        starts = np.array(
            [[run.start(task) for task in tasks] for run in method_runs], dtype=np.float64
        )
        iqm = statistics.stratified(statistics.interquartile_mean, scores)
        profile = statistics.profile_intervals(scores, THRESHOLDS)
        methods.append(Method(label, method_runs, scores, starts, iqm, profile))

    improvements = {}
    for x, y in itertools.combinations(methods, 2):
        improvements[x.label, y.label] = statistics.stratified(
            statistics.probability_of_improvement, x.scores, y.scores
        )
    return RunComparison(
        tasks=tuple(task.removeprefix("eval/").removesuffix("/pass@1") for task in tasks),
        differences=differences,
        methods=tuple(methods),
        improvements=improvements,
    )


def _common_tasks(runs: Sequence[Run], folders: Sequence[Path]) -> list[str]:
    """The metrics that are the scores: pass@1 of the common benchmarks, else the reward."""
    benchmarks_of_runs = []
    for run in runs:
        keys = set().union(*run.rows, run.results)
        benchmarks_of_runs.append({key for key in keys if key.endswith("/pass@1")})
    common = sorted(set.intersection(*benchmarks_of_runs)) or [_REWARD]

    tasks = [key for key in common if all(run.score(key) is not None for run in runs)]
    if not tasks:
        raise DataError(
            f"{', '.join(map(str, folders))}: no benchmark and no reward in common; compare "
            "finished runs"
        )
    return tasks


def _by_method(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each method, by seed. Raises DataError if a method has a seed twice."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        identity = sorted((key, repr(value)) for key, value in _identity(run).items())
        groups[repr(identity)].append(run)

    methods = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    for method in methods:
        for one, other in itertools.pairwise(method):
            if one.seed == other.seed:
                raise DataError(
                    f"{one.name} and {other.name} have the same configuration and seed; leave one "
                    "out"
                )
    return methods


def _differences(methods: Sequence[Sequence[Run]]) -> dict[str, list[Any]]:
    """Differing key -> value of each method."""
    keys = sorted(set().union(*(_identity(runs[0]) for runs in methods)))
    differences = {}
    for key in keys:
        values = [runs[0].config.get(key) for runs in methods]
        if any(value != values[0] for value in values):
            differences[key] = values
    return differences


# ----------------------------------------------------------------------------------- files of a run
def _read(folder: Path) -> Run:
    """Raises DataError for a folder without steps, or with values that are not numbers."""
    rows = read_metrics(folder)
    file = folder / CONFIG_FILE
    if not rows or not is_file(file):
        raise DataError(
            f"{folder}: no {CONFIG_FILE} with metrics.jsonl; give the folder of a run with at "
            f"least one step{near_run(folder)}"
        )
    config = _leaves(read_yaml(file, str(file)).plain(), "")
    results_file = folder / "eval" / "results.json"
    evaluation = read_object(results_file) if is_file(results_file) else {"metrics": {}}
    results = as_object(evaluation.get("metrics"), f"{results_file}: metrics")

    model = evaluation.get("model")
    if model and folder.resolve().name not in Path(str(model)).parts:
        raise DataError(
            f"{results_file} is of {model}, not of this run; evaluate again with --model {folder}"
        )
    for number, row in enumerate(rows, start=1):
        _check_numbers(row, f"{folder / METRICS_FILE}:{number}")
    _check_numbers(results, f"{results_file}: metrics")

    seed = config.get("run.seed", 0)
    if type(seed) is not int:
        raise DataError(f"{file}: run.seed={seed!r} is no integer; restore the file")
    changes = []
    for change in read_changes(folder):
        if not f"{change['key']}.".startswith(_IGNORED):
            changes.append(change)
    return Run(folder.resolve().name, seed, rows, config, results, changes)


def _check_numbers(metrics: Mapping[str, Any], where: str) -> None:
    for key, value in metrics.items():
        if value is None:
            continue
        is_number = type(value) in (int, float)
        if not is_number or ("/pass@" in key and not 0 <= value <= 1):
            raise DataError(
                f"{where}: {key}={value!r} is no number, or no share; restore the file, or "
                "evaluate again"
            )


def _leaves(tree: Any, prefix: str) -> dict[str, Any]:
    """Leaf values of a configuration by dotted key."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, part in tree.items():
        leaves |= _leaves(part, f"{prefix}.{name}".lstrip("."))
    return leaves


# ------------------------------------------------------------------------------------------ methods
def _identity(run: Run) -> dict[str, Any]:
    """The options that distinguish methods: all but the seed and names."""
    options = {}
    for key, value in run.config.items():
        if value is not None and not f"{key}.".startswith(_IGNORED):
            options[key] = value
    return options


def _labels(
    methods: Sequence[Sequence[Run]], differences: Mapping[str, Sequence[Any]]
) -> list[str]:
    """The objective, else the few keys that differ, else the name of the first run."""
    objectives = [str(name) for name in differences.get("objective.name", [])]
    if objectives and len(set(objectives)) == len(objectives):
        return objectives
    if 0 < len(differences) <= _MAX_LABEL_KEYS:
        last_words = [(key.rpartition(".")[2], values) for key, values in differences.items()]
        return [
            " ".join(f"{word}={values[number]}" for word, values in last_words)
            for number in range(len(methods))
        ]

    names = [runs[0].name for runs in methods]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
