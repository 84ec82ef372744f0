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
MetricsRow = dict[str, MetricValue]
"""One step's metrics; `step` is an int."""
_EXTREMES: Mapping[str, Any] = {"_max": np.maximum, "_min": np.minimum}
"""Suffix -> choice; a NaN remains in any order."""


@dataclass(frozen=True, slots=True)
class MetricSum:
    """A sum with its denominator.

    Adding two of them before the division is exact under any split of the samples.
    """

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
        """Adds the metrics of one update.

        Args:
            metrics: Means, and extremes by their suffix. None (an empty mean) adds nothing to the
                denominator.
            count: Number of samples, tokens or groups of the means.
        """
        for name, value in metrics.items():
            choose = _EXTREMES.get(name[-4:])
            if value is None:
                self.sums.setdefault(name, MetricSum(0.0, 0.0))
            elif choose is None:
                before = self.sums.get(name, MetricSum(0.0, 0.0))
                self.sums[name] = before + MetricSum(float(value * count), float(count))
            else:
                self.extremes[name] = float(choose(self.extremes.get(name, value), value))

    def add(self, other: "MetricSums") -> None:
        """Adds the metrics of `other`."""
        for name, metric in other.sums.items():
            self.add_means({name: metric.mean}, metric.count)
        self.add_means(other.extremes, 1)

    def values(self) -> dict[str, float | None]:
        """Means (None where the denominator is zero) and extremes by name."""
        means = {name: metric.mean for name, metric in self.sums.items()}
        return {**means, **self.extremes}


class MetricsWriter(Closing):
    """Appends rows to `<run_dir>/metrics.jsonl` and flushes each row to disk.

    On resume, call `truncate_after` first. Raises DataError if the file is malformed.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        rows = read_metrics(self.path)
        self._last_step = rows[-1]["step"] if rows else None

        num_bytes = sum(len(line) + 1 for line in complete_lines(self.path))
        if self.path.exists() and self.path.stat().st_size != num_bytes:
            # The next row would be appended to the incomplete last line.
            os.truncate(self.path, num_bytes)
        self._file: IO[bytes] = self.path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row: `step` first, the other keys sorted.

        Raises:
            NonFiniteError: A value is NaN or Inf, with its key.
            TypeError: A value is not a number.
            ValueError: The step is not after the last one.
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
    """The rows of a `metrics.jsonl` in order, without an incomplete last line; [] without a file.

    Args:
        path: The file, or its run folder.

    Raises:
        DataError: A row is malformed, with file and line.
    """
    if path.is_dir():
        path = path / METRICS_FILE
    rows: list[dict[str, Any]] = []
    last_step = -1
    for number, row in enumerate(parse_lines(complete_lines(path), path), start=1):
        step = row.get("step")
        # `type`, not `isinstance`: a bool is an int. A float represents every int below 2**53.
        if type(step) is not int or not last_step < step < 2**53:
            raise DataError(
                f"{path}:{number}: expected an int step after {last_step}, got {step!r}; delete "
                "the line"
            )
        rows.append(row)
        last_step = step
    return rows


def truncate_metrics(run_dir: Path, step: int) -> int:
    """Atomically removes the rows of steps > `step` from `metrics.jsonl`.

    Returns the number of removed rows.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0

    rows = read_metrics(path)
    num_left: int = sum(row["step"] <= step for row in rows)
    last_step = rows[num_left - 1]["step"] if num_left else None
    if last_step != step and step > 0:
        logger.warning(
            "%s ends at step %s, before the checkpoint's step %d: its curves have a gap",
            path,
            last_step,
            step,
        )

    # The same bytes, not formatted again.
    lines = [line + b"\n" for line in islice(complete_lines(path), num_left)]
    if path.stat().st_size != sum(map(len, lines)):
        write_atomically(path, lines)
    return len(rows) - num_left
