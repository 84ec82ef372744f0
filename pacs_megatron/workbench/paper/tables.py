"""Tables of `paper`: pass@k and diversity with intervals, beside published numbers."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.errors import DataError
from pacs_megatron.rollout.passk import pass_at_k
from pacs_megatron.runtime.json_reader import parsing, read_object
from pacs_megatron.workbench.diversity import Vectors, question_scores
from pacs_megatron.workbench.evaluation.results import aligned
from pacs_megatron.workbench.statistics import Interval, bootstrap_average, bootstrap_seeds

Folders = Mapping[str, Sequence[Path]]
"""Method -> folders, one per seed"""
OVER_BASE = "over base"
"""Column of the differences to the untrained model"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value: pass@k in per cent, or a diversity."""

    place: tuple[str, str]
    """model and benchmark"""
    method: str
    metric: str
    seeds: int
    ours: Interval | None
    """mean over seeds and problems"""
    published: float | None

    def text(self) -> str:
        """`88.12 [86.01, 90.20] / 88.69`"""
        digits = ".4f"
        if self.metric == OVER_BASE:
            digits = "+.2f"
        elif self.metric.startswith("pass@"):
            digits = ".2f"
        text = "-"
        if self.ours is not None:
            text = "{:{d}} [{:{d}}, {:{d}}]".format(*self.ours, d=digits)
        if self.published is not None:
            text += f" / {self.published:{digits}}"
        return text


def pass_cells(
    place: tuple[str, str], ks: Sequence[int], evaluations: Folders, published: Any
) -> Iterator[Cell]:
    """pass@k over problems with k judged responses.

    Args:
        place: model and benchmark.
        ks: the k of the columns.
        evaluations: the evaluation folders of each method.
        published: method -> k -> per cent.

    Raises:
        DataError: evaluations of one method have different numbers of problems.
    """
    for method, folders in evaluations.items():
        for k, scores in zip(ks, _scores_by_k(folders, place[1], ks), strict=True):
            yield Cell(
                place=place,
                method=method,
                metric=f"pass@{k}",
                seeds=len(folders),
                ours=bootstrap_seeds(scores),
                published=published.get(method, {}).get(k),
            )


def average_cells(
    model: str, evaluations: Mapping[str, Mapping[str, Sequence[Path]]], published: Any
) -> Iterator[Cell]:
    """pass@1 as the mean over benchmarks, and its difference to the untrained model's.

    Args:
        model: of the study.
        evaluations: method -> benchmark -> the evaluation folders, one per seed. `base` is the
            untrained model.
        published: method -> per cent.

    Raises:
        DataError: same as `pass_cells`, or the problems of a method are not those of `base`.
    """
    scores = {}
    for method, benchmarks in evaluations.items():
        scores[method] = [
            _scores_by_k(folders, name, [1])[0] for name, folders in benchmarks.items()
        ]
        for name, mine, bases in zip(benchmarks, scores[method], scores["base"], strict=True):
            if mine.shape[1] != bases.shape[1]:
                raise DataError(
                    f"{method} has {mine.shape[1]} problems of {name}, base has {bases.shape[1]}; "
                    "evaluate one of them again"
                )

    num_benchmarks = len(scores["base"])
    place = (model, f"average of {num_benchmarks} benchmarks")
    for method, parts in scores.items():
        seeds = len(parts[0])
        value = published.get(method)
        yield Cell(place, method, "pass@1", seeds, bootstrap_average(parts), value)
        ours = None
        difference = None
        if method != "base":
            ours = bootstrap_average(parts, scores["base"])
            if value is not None:
                difference = round(value - published["base"], 2)
        yield Cell(place, method, OVER_BASE, seeds, ours, difference)


def _scores_by_k(folders: Sequence[Path], benchmark: str, ks: Sequence[int]) -> np.ndarray:
    """pass@k in per cent, float [ks, seeds, problems].

    Raises DataError for other numbers of problems, or a damaged file.
    """
    passes = [_passes(folder / "results.json", benchmark, ks) for folder in folders]
    if len({array.shape for array in passes}) > 1:
        files = ", ".join(f"{folder}/results.json" for folder in folders)
        raise DataError(
            f"{files}: {benchmark} has other numbers of problems; remove the wrong files, run it "
            "again"
        )
    return np.stack(passes, axis=1)


def _passes(file: Path, benchmark: str, ks: Sequence[int]) -> np.ndarray:
    """pass@k in per cent, float [ks, problems]; NaN with fewer than k judged responses.

    Raises DataError for a damaged file.
    """
    with parsing(str(file), DataError):
        problems = read_object(file)["problems"][benchmark]
        counts = [(problem["num_samples"], problem["num_correct"]) for problem in problems]
        rows = []
        for k in ks:
            rows.append(
                [100 * pass_at_k(n, correct, k) if n >= k else np.nan for n, correct in counts]
            )
    return np.array(rows)


def diversity_cells(
    place: tuple[str, str], runs: Folders, vectors: Vectors, published: Any
) -> Iterator[Cell]:
    """Diversity over questions.

    Args:
        place: model and benchmark.
        runs: the run folders of each method.
        vectors: the embeddings of all runs.
        published: method -> benchmark -> value.
    """
    for method, folders in runs.items():
        endings = tuple(f"/{folder.name} {place[1]}" for folder in folders)
        scores_of_runs = []
        for name, questions in vectors.items():
            if name.endswith(endings):
                scores_of_runs.append(question_scores(questions))

        questions_of_all = sorted(set().union(*scores_of_runs))
        scores = np.array(
            [[run.get(name, np.nan) for name in questions_of_all] for run in scores_of_runs]
        )
        yield Cell(
            place=place,
            method=method,
            metric="diversity",
            seeds=len(folders),
            ours=bootstrap_seeds(scores),
            published=published.get(method, {}).get(place[1]),
        )


def table_text(cells: Sequence[Cell]) -> str:
    """The table as text.

    One block per model and benchmark, one line per method, one column per metric.
    """
    blocks = []
    for place, block in itertools.groupby(cells, key=lambda cell: cell.place):
        by_method = itertools.groupby(block, key=lambda cell: cell.method)
        lines = [list(line) for _, line in by_method]
        rows = [["method", "seeds", *(cell.metric for cell in lines[0])]]
        for line in lines:
            texts = [cell.text() for cell in line]
            rows.append([line[0].method, str(line[0].seeds), *texts])
        blocks.append(f"{' '.join(place)}\n{aligned(rows)}")
    return "\n\n".join(blocks)
