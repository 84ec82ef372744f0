"""`pacs-megatron compare`: statistics of runs that differ in configuration and seed.

Runs whose configurations differ in the seed only are one method. A task is a benchmark; a score is
a run's final pass@1 on it, or its final reward without benchmarks. The aggregates are those of
`evaluation/statistics.py`.
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
from pacs_megatron.runtime.run_folder import CONFIG_FILE, METRICS_FILE
from pacs_megatron.workbench import statistics

THRESHOLDS = tuple(percent / 100 for percent in range(101))
MIN_SEEDS = 4
"""With fewer on both sides no difference can have p < 0.05 in a permutation of seeds."""
_SAME_METHOD = ("run.seed", "run.name", "run.dir", "run.nproc", "resources", "logging")
_REWARD = "reward/mean"
_MOST_KEYS = 3
"""Maximum number of differing keys in a label"""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run folder that are compared: leaf values by dotted key, and the metrics of
    <run>/eval/results.json.
    """

    name: str
    seed: int
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    results: Mapping[str, Any]

    def score(self, key: str) -> float | None:
        """The value of the evaluation, else of the last step; None without either."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        value = self.results.get(key, values[-1] if values else None)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Method:
    """Runs with one configuration. `scores`: float64 [runs, tasks]; `profile`: at THRESHOLDS."""

    label: str
    runs: Sequence[Run]
    scores: np.ndarray
    iqm: statistics.Interval
    profile: Sequence[statistics.Interval]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The methods in the order of their first runs, and every pair of them."""

    tasks: tuple[str, ...]
    differences: Mapping[str, Sequence[Any]]
    """differing key -> value of each method"""
    methods: tuple[Method, ...]
    improvements: Mapping[tuple[str, str], statistics.Interval]
    """(x, y) -> probability that a run of x has a higher score than a run of y"""

    def sentences(self) -> list[str]:
        """One sentence for each pair of methods: which is better, and whether the difference is
        significant.
        """
        found = []
        methods = {method.label: method for method in self.methods}
        ends = {run.rows[-1]["step"] for method in self.methods for run in method.runs}
        if len(ends) > 1:
            found.append(
                f"The runs end at different steps ({min(ends)} to {max(ends)}); a score is a "
                "run's last one."
            )
        for (x, y), chance in self.improvements.items():
            fewest = min(len(methods[x].runs), len(methods[y].runs))
            if fewest < MIN_SEEDS:
                found.append(
                    f"{x} and {y}: fewer than {MIN_SEEDS} seeds ({fewest}) cannot order them."
                )
                continue
            p = statistics.permutation_p(methods[x].scores, methods[y].scores)
            verdict = "significant" if p < 0.05 else "not significant"
            found.append(
                f"A run of {x} is better than one of {y} with probability {chance.value:.2f} "
                f"[{chance.low:.2f}, {chance.high:.2f}]. The difference in the mean score is "
                f"{verdict} (p = {p:.2g} by permutation of seeds, at least {fewest} seeds each)."
            )
        return found


def compare(folders: Sequence[Path]) -> Comparison:
    """Reads the runs and compares them.

    Raises DataError for no run, no common score, or a seed twice in one method.
    """
    check_distinct(folders)
    runs = [_read(folder) for folder in folders]
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[repr(sorted((key, repr(value)) for key, value in _own(run).items()))].append(run)
    keys = [
        {key for row in (*run.rows, run.results) for key in row if key.endswith("/pass@1")}
        for run in runs
    ]
    common = sorted(set.intersection(*keys)) or [_REWARD]
    tasks = [key for key in common if all(run.score(key) is not None for run in runs)]
    if not tasks:
        raise DataError(
            f"{', '.join(map(str, folders))}: no benchmark and no reward in common; compare "
            "finished runs"
        )
    members = [sorted(found, key=lambda run: run.seed) for found in groups.values()]
    for one, other in itertools.chain.from_iterable(map(itertools.pairwise, members)):
        if one.seed == other.seed:
            raise DataError(
                f"{one.name} and {other.name} have the same configuration and seed; leave one out"
            )
    options = sorted({key for found in members for key in _own(found[0])})
    values = {key: [found[0].config.get(key) for found in members] for key in options}
    differences = {
        key: given for key, given in values.items() if any(value != given[0] for value in given)
    }
    methods = []
    for label, found in zip(_labels(members, differences), members, strict=True):
        scores = np.array([[run.score(task) for task in tasks] for run in found], dtype=np.float64)
        iqm = statistics.stratified(statistics.interquartile_mean, scores)
        profile = statistics.profile_intervals(scores, THRESHOLDS)
        methods.append(Method(label, found, scores, iqm, profile))
    return Comparison(
        tasks=tuple(task.removeprefix("eval/").removesuffix("/pass@1") for task in tasks),
        differences=differences,
        methods=tuple(methods),
        improvements={
            (x.label, y.label): statistics.stratified(
                statistics.probability_of_improvement, x.scores, y.scores
            )
            for x, y in itertools.combinations(methods, 2)
        },
    )


def _read(folder: Path) -> Run:
    rows = read_metrics(folder)
    file = folder / CONFIG_FILE
    evaluated = folder / "eval" / "results.json"
    if not rows or not is_file(file):
        raise DataError(
            f"{folder}: no {CONFIG_FILE} with metrics.jsonl; give the folder of a run with at "
            "least one step"
        )
    config = _leaves(read_yaml(file, str(file)).plain(), "")
    evaluation = read_object(evaluated) if is_file(evaluated) else {"metrics": {}}
    results = as_object(evaluation.get("metrics"), f"{evaluated}: metrics")
    if (model := evaluation.get("model")) and folder.resolve().name not in Path(str(model)).parts:
        raise DataError(
            f"{evaluated} is of {model}, not of this run; evaluate again with --model {folder}"
        )
    numbered = {
        f"{folder / METRICS_FILE}:{number}": row for number, row in enumerate(rows, start=1)
    }
    for where, metrics in (numbered | {f"{evaluated}: metrics": results}).items():
        for key, value in metrics.items():
            if value is not None and (
                type(value) not in (int, float) or ("/pass@" in key and not 0 <= value <= 1)
            ):
                raise DataError(
                    f"{where}: {key}={value!r} is no number, or no share; restore the file, or "
                    "evaluate again"
                )
    seed = config.get("run.seed", 0)
    if type(seed) is not int:
        raise DataError(f"{file}: run.seed={seed!r} is no integer; restore the file")
    return Run(folder.resolve().name, seed, rows, config, results)


def _leaves(tree: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, part in tree.items():
        found |= _leaves(part, f"{prefix}.{name}".lstrip("."))
    return found


def _own(run: Run) -> dict[str, Any]:
    """The options that distinguish methods: all but the seed and names."""
    same = tuple(f"{key}." for key in _SAME_METHOD)
    return {
        key: v for key, v in run.config.items() if v is not None and not f"{key}.".startswith(same)
    }


def _labels(
    members: Sequence[Sequence[Run]], differences: Mapping[str, Sequence[Any]]
) -> list[str]:
    names = differences.get("objective.name", [])
    if names and len(set(map(str, names))) == len(names):
        return [str(name) for name in names]
    if not 0 < len(differences) <= _MOST_KEYS:
        firsts = [runs[0].name for runs in members]
        are_distinct = len(set(firsts)) == len(firsts)
        return (
            firsts
            if are_distinct
            else [f"{name} ({number})" for number, name in enumerate(firsts, start=1)]
        )
    given = [(key.rpartition(".")[2], values) for key, values in differences.items()]
    return [
        " ".join(f"{key}={values[number]}" for key, values in given)
        for number in range(len(members))
    ]
