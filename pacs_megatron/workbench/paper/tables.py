"""Tables of `pacs-megatron paper`: pass@k and diversity with intervals, beside published numbers."""

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
from pacs_megatron.workbench.statistics import Interval, bootstrap_seeds

Folders = Mapping[str, Sequence[Path]]
"""Method -> folders, one per seed"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value: pass@k in per cent, or a diversity.

    `place`: model and benchmark; `ours`: mean over seeds and problems.
    """

    place: tuple[str, str]
    method: str
    metric: str
    seeds: int
    ours: Interval | None
    published: float | None

    def text(self) -> str:
        """`88.12 [86.01, 90.20] / 88.69`"""
        digits = ".2f" if self.metric.startswith("pass@") else ".4f"
        ours = "-" if self.ours is None else "{:{d}} [{:{d}}, {:{d}}]".format(*self.ours, d=digits)
        return ours if self.published is None else f"{ours} / {self.published:{digits}}"


def pass_cells(
    place: tuple[str, str], ks: Sequence[int], evaluations: Folders, published: Any
) -> Iterator[Cell]:
    """pass@k over problems with k judged responses. `published`: method -> k -> per cent."""
    for method, folders in evaluations.items():
        found = [_passes(folder / "results.json", place[1], ks) for folder in folders]
        if len({passes.shape for passes in found}) > 1:
            files = ", ".join(f"{folder}/results.json" for folder in folders)
            raise DataError(
                f"{files}: {place[1]} has other numbers of problems; remove the wrong files, run "
                "it again"
            )
        for k, scores in zip(ks, np.stack(found, axis=1), strict=True):
            ours = bootstrap_seeds(scores)
            yield Cell(
                place, method, f"pass@{k}", len(folders), ours, published.get(method, {}).get(k)
            )


def _passes(file: Path, benchmark: str, ks: Sequence[int]) -> np.ndarray:
    """Per cent, float [ks, problems]; NaN with fewer than k judged responses.

    Raises DataError for a damaged file.
    """
    with parsing(str(file), DataError):
        counts = [
            (p["num_samples"], p["num_correct"]) for p in read_object(file)["problems"][benchmark]
        ]
        passes = [
            [100 * pass_at_k(n, correct, k) if n >= k else np.nan for n, correct in counts]
            for k in ks
        ]
    return np.array(passes)


def diversity_cells(
    place: tuple[str, str], runs: Folders, vectors: Vectors, published: Any
) -> Iterator[Cell]:
    """Diversity over questions. `published`: method -> benchmark -> value."""
    for method, folders in runs.items():
        ends = tuple(f"/{folder.name} {place[1]}" for folder in folders)
        found = [
            question_scores(questions) for name, questions in vectors.items() if name.endswith(ends)
        ]
        names = sorted(set().union(*found))
        ours = bootstrap_seeds(
            np.array([[scores.get(name, np.nan) for name in names] for scores in found])
        )
        yield Cell(
            place, method, "diversity", len(folders), ours, published.get(method, {}).get(place[1])
        )


def table_text(cells: Sequence[Cell]) -> str:
    """The table as text: one block per model and benchmark, one line per method, one column per
    metric.
    """
    parts = []
    for place, block in itertools.groupby(cells, key=lambda cell: cell.place):
        lines = [list(row) for _, row in itertools.groupby(block, key=lambda cell: cell.method)]
        header = ["method", "seeds", *(cell.metric for cell in lines[0])]
        rows = [[row[0].method, str(row[0].seeds), *(cell.text() for cell in row)] for row in lines]
        parts.append(f"{' '.join(place)}\n{aligned([header, *rows])}")
    return "\n\n".join(parts)
