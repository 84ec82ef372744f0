"""`pacs-megatron compare`: statistics of runs that differ in configuration and seed.

Runs whose configurations differ in the seed only are one method. A task is a benchmark; a score is a run's final pass@1
on it, or its final reward without benchmarks. The aggregates are those of `evaluation/statistics.py`.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import DataError
from pacs_megatron.evaluation.statistics import (
    Interval,
    improvement,
    interquartile_mean,
    performance_profile,
    permutation_p,
    stratified,
)
from pacs_megatron.observability.metrics import Row, read_metrics
from pacs_megatron.runtime.files import check_distinct, is_file
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, METRICS_FILE

THRESHOLDS = tuple(percent / 100 for percent in range(101))
MIN_SEEDS = 4
"""Below it no difference can have p < 0.05 in a permutation of seeds."""
_SAME_METHOD = ("run.seed", "run.name", "run.dir", "run.nproc", "resources", "logging")
_REWARD = "reward/mean"
_MOST_KEYS = 3
"""Differing keys that fit into a label"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run folder that are compared."""

    name: str
    seed: int
    rows: Sequence[Row]
    config: Mapping[str, Any]
    """leaf values by dotted key"""
    results: Mapping[str, Any]
    """metrics of <run>/eval/results.json; empty without"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Runs with one configuration."""

    label: str
    runs: tuple[Run, ...]
    scores: np.ndarray
    """float64 [runs, tasks]"""
    iqm: Interval
    profile: Sequence[float]
    """at THRESHOLDS"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The methods in the order of their first runs, and every pair of them."""

    tasks: tuple[str, ...]
    differences: Mapping[str, Sequence[Any]]
    """differing key -> value of each method"""
    methods: tuple[Method, ...]
    improvements: Mapping[tuple[str, str], Interval] = field(default_factory=dict)
    """(x, y) -> probability that a run of x has a higher score than a run of y"""

    def sentences(self) -> list[str]:
        """One sentence for each pair of methods: which is better, and whether the difference is significant."""
        found = []
        for (x, y), chance in self.improvements.items():
            one, other = (next(m for m in self.methods if m.label == label) for label in (x, y))
            fewest = min(len(one.runs), len(other.runs))
            if fewest < MIN_SEEDS:
                found.append(f"{x} and {y}: fewer than {MIN_SEEDS} seeds ({fewest}) cannot order them.")
                continue
            p = permutation_p(one.scores, other.scores)
            verdict = "significant" if p < 0.05 else "not significant"
            found.append(
                f"A run of {x} is better than one of {y} with probability {chance.value:.2f} [{chance.low:.2f}, "
                f"{chance.high:.2f}]. The difference in the mean score is {verdict} (p = {p:.3f} by permutation of seeds, "
                f"at least {fewest} seeds each)."
            )
        return found


def compare(folders: Sequence[Path]) -> Comparison:
    """Reads the runs and compares them. Raises DataError for a folder that is no run, or runs without a common score."""
    check_distinct(folders)
    runs = [_read(folder) for folder in folders]
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[repr(sorted((key, repr(value)) for key, value in run.config.items() if _counts(key)))].append(run)
    tasks = [key for key in _tasks(runs[0]) if all(_score(run, key) is not None for run in runs)]
    if not tasks:
        raise DataError(
            f"{', '.join(map(str, folders))}: no benchmark and no reward that all runs have; compare finished runs"
        )
    members = [tuple(sorted(found, key=lambda run: run.seed)) for found in groups.values()]
    keys = sorted({key for found in members for key in found[0].config if _counts(key)})
    values = {key: [found[0].config.get(key) for found in members] for key in keys}
    differences = {key: given for key, given in values.items() if any(value != given[0] for value in given)}
    methods = []
    for number, found in enumerate(members):
        scores = np.array([[_score(run, task) for task in tasks] for run in found], dtype=np.float64)
        method = Method(
            label=_label(members, number, differences),
            runs=found,
            scores=scores,
            iqm=stratified(interquartile_mean, scores),
            profile=performance_profile(scores, THRESHOLDS),
        )
        methods.append(method)
    pairs = itertools.combinations(methods, 2)
    return Comparison(
        tasks=tuple(task.removeprefix("eval/").removesuffix("/pass@1") for task in tasks),
        differences=differences,
        methods=tuple(methods),
        improvements={(x.label, y.label): improvement(x.scores, y.scores) for x, y in pairs},
    )


def _read(folder: Path) -> Run:
    rows = read_metrics(folder)
    if not rows or not is_file(folder / CONFIG_FILE):
        raise DataError(
            f"{folder}: no {CONFIG_FILE} with metrics.jsonl; give the folder of a run with at least one step"
        )
    config = _leaves(read_yaml(folder / CONFIG_FILE, str(folder / CONFIG_FILE)).plain(), "")
    path = folder / "eval" / "results.json"
    results = read_object(path).get("metrics") if is_file(path) else {}
    if not isinstance(results, dict) or not all(_is_score(key, results[key]) for key in results):
        raise DataError(
            f"{path}: metrics are no object of numbers, or a pass@k is not in [0, 1]; evaluate the run again"
        )
    for number, row in enumerate(rows, start=1):
        for key in row:
            if not _is_score(key, row[key]):
                raise DataError(
                    f"{folder / METRICS_FILE}:{number}: {key}={row[key]!r} is no such number; restore the file"
                )
    seed = config.get("run.seed", 0)
    if type(seed) is not int:
        raise DataError(f"{folder / CONFIG_FILE}: run.seed={seed!r} is no integer; restore the file")
    return Run(name=folder.resolve().name, seed=seed, rows=rows, config=config, results=results)


def _is_score(key: str, value: Any) -> bool:
    if value is None:
        return True
    return type(value) in (int, float) and ("/pass@" not in key or 0 <= value <= 1)


def _leaves(tree: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value
        for name, part in tree.items()
        for key, value in _leaves(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def _counts(key: str) -> bool:
    return not any(key == same or key.startswith(f"{same}.") for same in _SAME_METHOD)


def _tasks(run: Run) -> list[str]:
    found = {key for row in run.rows for key in row if key.endswith("/pass@1")} | {
        key for key in run.results if key.endswith("/pass@1")
    }
    return sorted(found) or [_REWARD]


def _score(run: Run, key: str) -> float | None:
    """The evaluation's value where there is one, else the last step's."""
    values = [row[key] for row in run.rows if row.get(key) is not None]
    value = run.results.get(key, values[-1] if values else None)
    return None if value is None else float(value)


def _label(members: Sequence[Sequence[Run]], number: int, differences: Mapping[str, Sequence[Any]]) -> str:
    names = differences.get("objective.name", [])
    if names and len(set(names)) == len(names):
        return str(names[number])
    if not 0 < len(differences) <= _MOST_KEYS:
        firsts = [runs[0].name for runs in members]
        return firsts[number] if len(set(firsts)) == len(firsts) else f"{firsts[number]} ({number + 1})"
    return " ".join(f"{key.rpartition('.')[2]}={given[number]}" for key, given in differences.items())
