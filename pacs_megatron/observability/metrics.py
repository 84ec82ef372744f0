"""Metrics with their denominators, and `metrics.jsonl`, which has one JSON object per step.

A row contains `step` and numbers. Keys are `<group>/<name>`. Keys that end in `_max` and `_min` are
extremes, all others means or counts. A value is null if its denominator is zero in that step. Rows
are written before the step's checkpoint, so every row up to the step of a checkpoint is on disk.
"""

import logging
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from pacs_megatron.errors import DataError, NonFiniteError
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.files import (
    complete_lines,
    json_line,
    naming,
    parse_lines,
    write_atomically,
)
from pacs_megatron.runtime.run_folder import METRICS_FILE

logger = logging.getLogger(__name__)

MetricValue = float | int | None
Row = dict[str, MetricValue]
"""One step's metrics; `step` is an int."""
_EXTREMES: Mapping[str, Any] = {"_max": np.maximum, "_min": np.minimum}
"""Suffix -> choice; a NaN remains in any order."""


@dataclass(frozen=True, slots=True)
class MetricSum:
    """A sum with its denominator. Adding two of them before the division is exact under any split."""

    total: float
    count: float

    def __add__(self, other: "MetricSum") -> "MetricSum":
        return MetricSum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float | None:
        """total / count, or None if the count is 0."""
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class MetricSums:
    """Metrics of a step, accumulated over its updates: sums with denominators, and extremes."""

    sums: dict[str, MetricSum] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)

    def add_means(self, metrics: Mapping[str, float | None], count: float) -> None:
        """Adds the metrics of one update: means over `count` samples, tokens or groups, and
        extremes by their suffix.

        None (an empty mean) adds nothing to the denominator.
        """
        for name, value in metrics.items():
            choose = _EXTREMES.get(name[-4:])
            if value is None:
                self.sums.setdefault(name, MetricSum(0.0, 0.0))
            elif choose is None:
                own = MetricSum(float(value * count), float(count))
                self.sums[name] = self.sums.get(name, MetricSum(0.0, 0.0)) + own
            else:
                self.extremes[name] = float(choose(self.extremes.get(name, value), value))

    def values(self) -> dict[str, float | None]:
        """Means (None where the denominator is zero) and extremes by name."""
        return {**{name: item.mean for name, item in self.sums.items()}, **self.extremes}


class MetricsWriter(Closing):
    """Appends rows to `<run_dir>/metrics.jsonl` and flushes each row to disk.

    On resume, call `truncate_after` first. Raises DataError if the file is malformed.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        rows = read_metrics(self.path)
        self._last_step = rows[-1]["step"] if rows else None
        whole = sum(len(line) + 1 for line in complete_lines(self.path))
        if self.path.exists() and self.path.stat().st_size != whole:
            # The next row would be appended to the incomplete last line.
            os.truncate(self.path, whole)
        self._file: IO[bytes] = self.path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row: `step` first, the other keys sorted.

        Raises NonFiniteError with the key of a NaN or Inf, TypeError for a value that is no number,
        and ValueError if the step is not after the last one.
        """
        step = int(row["step"])
        last = self._last_step
        if last is not None and step <= last:
            raise ValueError(
                f"metrics of step {step} after step {last}: call truncate_after on resume"
            )
        values = {key: _plain(key, row[key], step) for key in sorted(row) if key != "step"}
        with naming(self.path):
            self._file.write(json_line({"step": step, **values}))
            self._file.flush()
            os.fsync(self._file.fileno())
        self._last_step = step

    def close(self) -> None:
        with naming(self.path):  # it writes the bytes that a failed write has left
            self._file.close()


def _plain(key: str, value: Any, step: int) -> MetricValue:
    """A value as a number of Python."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"metric {key} must be a number or None, got {type(value).__name__}")
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(
            f"metric {key} of step {step}: got {number}, expected a finite number; the row of "
            "this step was not written"
        )
    return number


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl` (or of its run folder) in order, without an incomplete last
    line; [] without a file.

    Raises DataError with file and line of a malformed row.
    """
    if path.is_dir():
        path = path / METRICS_FILE
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(parse_lines(complete_lines(path), path), start=1):
        step = row.get("step")
        before = rows[-1]["step"] if rows else -1
        if type(step) is not int or not before < step < 2**53:
            raise DataError(
                f"{path}:{number}: expected an int step after {before}, got {step!r}; delete the "
                "line"
            )
        rows.append(row)
    return rows


def truncate_metrics(run_dir: Path, step: int) -> int:
    """Atomically removes the rows of steps > `step` from `metrics.jsonl`.

    Returns the number of removed rows.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    rows = read_metrics(path)
    keep: int = sum(row["step"] <= step for row in rows)
    last = rows[keep - 1]["step"] if keep else None
    if last != step and step > 0:
        logger.warning(
            "%s ends at step %s, before the checkpoint's step %d: its curves have a gap",
            path,
            last,
            step,
        )
    kept = [
        line + b"\n" for line in islice(complete_lines(path), keep)
    ]  # the same bytes, not formatted again
    if path.stat().st_size != sum(map(len, kept)):
        write_atomically(path, kept)
    return len(rows) - keep
