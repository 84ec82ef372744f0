"""Tables of `pacs-megatron paper`: pass@k and diversity with intervals, beside published numbers."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.evaluation.diversity import load_vectors, question_scores
from pacs_megatron.evaluation.passk import pass_at_k
from pacs_megatron.evaluation.results import aligned
from pacs_megatron.evaluation.statistics import Interval, bootstrap_seeds
from pacs_megatron.runtime.json_reader import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One value: pass@k in per cent, or a diversity."""

    model: str
    benchmark: str
    method: str
    metric: str
    seeds: int
    ours: Interval | None
    """mean over seeds and problems, 95 % bootstrap over both"""
    published: float | None

    def text(self) -> str:
        """`88.12 [86.01, 90.20] / 88.69`"""
        digits = ".2f" if self.metric.startswith("pass@") else ".4f"
        ours = "-" if self.ours is None else "{:{d}} [{:{d}}, {:{d}}]".format(*self.ours, d=digits)
        return ours if self.published is None else f"{ours} / {self.published:{digits}}"


def pass_cells(
    model: str, benchmark: str, ks: Sequence[int], evaluations: Mapping[str, Sequence[Path]], published: Mapping[str, Any]
) -> Iterator[Cell]:  # fmt: skip
    """pass@k of the evaluations of each method, one a seed; a problem with fewer than k judged responses does not count.

    `published`: method -> benchmark -> k -> per cent.
    """
    for method, folders in evaluations.items():
        counts = [read_object(folder / "results.json")["problems"][benchmark] for folder in folders]
        for k in ks:
            scores = [
                [pass_at_k(n, p["num_correct"], k) if (n := p["num_samples"]) >= k else np.nan for p in problems]
                for problems in counts
            ]
            known = published.get(method, {}).get(benchmark, {}).get(k)
            ours = bootstrap_seeds(100 * np.array(scores))
            yield Cell(model=model, benchmark=benchmark, method=method, metric=f"pass@{k}", seeds=len(folders),
                       ours=ours, published=known)  # fmt: skip


def diversity_cells(
    model: str, benchmark: str, files: Mapping[str, Sequence[Path]], published: Mapping[str, Any]
) -> Iterator[Cell]:
    """Diversity of each method from the embeddings of its evaluations. `published`: method -> benchmark -> value."""
    for method, paths in files.items():
        found = [
            question_scores(questions)
            for path in paths
            for name, questions in load_vectors([path])[1].items()
            if name.endswith(f" {benchmark}")
        ]
        names = sorted({question for scores in found for question in scores})
        scores = np.array([[scores.get(question, np.nan) for question in names] for scores in found])
        yield Cell(model=model, benchmark=benchmark, method=method, metric="diversity", seeds=len(paths),
                   ours=bootstrap_seeds(scores) if names else None,
                   published=published.get(method, {}).get(benchmark))  # fmt: skip


def table_text(cells: Sequence[Cell]) -> str:
    """A block a model and benchmark: a line a method, a column a metric."""
    parts = []
    for (model, benchmark), block in itertools.groupby(cells, key=lambda cell: (cell.model, cell.benchmark)):
        lines = [(method, list(row)) for method, row in itertools.groupby(block, key=lambda cell: cell.method)]
        header = ["method", "seeds", *(cell.metric for cell in lines[0][1])]
        rows = [[method, str(row[0].seeds), *(cell.text() for cell in row)] for method, row in lines]
        parts.append(f"{model} {benchmark}\n{aligned([header, *rows])}")
    return "\n\n".join(parts)
