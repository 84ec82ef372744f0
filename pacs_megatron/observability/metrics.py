"""Metrics: a value with its denominator, and `metrics.jsonl`, one JSON object a step.

A row contains `step` and numbers. Keys are `<group>/<name>`; evaluation results are in the row of their step
(`eval/<benchmark>/pass@1`). A value is null where its denominator is zero in that step (for example the mean score of
correct samples in a step without any). NaN and Inf raise NonFiniteError. Keys ending in `_max` and `_min` are extremes;
all others are means or counts.

Rows are written in order of their step, and before the step's checkpoint. So every row up to the step of a checkpoint
is on disk before the checkpoint.
"""

import logging
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from pacs_megatron.errors import DataError, NonFiniteError
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.files import complete_lines, json_line, naming, parse_lines, write_atomically
from pacs_megatron.runtime.run_folder import METRICS_FILE

logger = logging.getLogger(__name__)


MetricValue = float | int | None
Row = dict[str, MetricValue]
"""One step's metrics; `step` is an int."""


# ------------------------------------------------------------------------------------------------------- accumulation
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

    def add(self, name: str, total: float, count: float) -> None:
        """Adds `total` over `count` samples, tokens or groups to the mean `name`."""
        if _extreme_of(name) is not None:
            raise ValueError(f"{name} has the suffix of an extreme; use add_extreme, or rename the mean")
        self.sums[name] = self.sums.get(name, MetricSum(0.0, 0.0)) + MetricSum(float(total), float(count))

    def add_extreme(self, name: str, value: float) -> None:
        """Keeps the larger value of a name that ends in `_max`, the smaller of one that ends in `_min`."""
        choose = _extreme_of(name)
        if choose is None:
            raise ValueError(f"{name} must end in _max or _min")
        value = float(value)
        if name not in self.extremes:
            self.extremes[name] = value
        elif math.isnan(value) or math.isnan(self.extremes[name]):
            self.extremes[name] = math.nan  # max() would drop a NaN, depending on the order
        else:
            self.extremes[name] = choose(self.extremes[name], value)

    def add_means(self, metrics: Mapping[str, float | None], count: float) -> None:
        """Adds the metrics of one update: means over `count` samples, and extremes by their suffix.

        None (an empty mean) adds nothing to the denominator.
        """
        for name, value in metrics.items():
            if value is None:
                self.sums.setdefault(name, MetricSum(0.0, 0.0))
            elif _extreme_of(name) is not None:
                self.add_extreme(name, value)
            else:
                self.add(name, value * count, count)

    def values(self) -> dict[str, float | None]:
        """Means (None where the denominator is zero) and extremes by name."""
        return {**{name: item.mean for name, item in self.sums.items()}, **self.extremes}


def _extreme_of(name: str) -> Any:
    if name.endswith("_max"):
        return max
    return min if name.endswith("_min") else None


# --------------------------------------------------------------------------------------------------------------- file
class MetricsWriter(Closing):
    """Appends rows to `<run_dir>/metrics.jsonl` and flushes each row to disk.

    On resume, call `truncate_after` first. Raises DataError if the file is malformed.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        rows = _checked(parse_lines(complete_lines(self.path), self.path), self.path)
        self.last_step: int | None = rows[-1]["step"] if rows else None
        whole = sum(len(line) + 1 for line in complete_lines(self.path))
        if self.path.exists() and self.path.stat().st_size != whole:
            # The next row would be appended to the incomplete last line.
            os.truncate(self.path, whole)
        self._file: IO[bytes] = self.path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row: `step` first, the other keys sorted.

        Raises NonFiniteError with the key of a NaN or Inf, ValueError if the step is not after the last one.
        """
        clean = clean_row(row)
        step = clean["step"]
        if self.last_step is not None and step <= self.last_step:  # type: ignore[operator]
            raise ValueError(f"metrics of step {step} after step {self.last_step}: call truncate_after on resume")
        with naming(self.path):
            self._file.write(json_line(clean))
            self._file.flush()
            os.fsync(self._file.fileno())
        self.last_step = step  # type: ignore[assignment]

    def close(self) -> None:
        with naming(self.path):  # it writes the bytes that a failed write has left
            self._file.close()


def clean_row(row: Mapping[str, Any]) -> Row:
    """Returns `row` as plain Python numbers, `step` first, then sorted.

    Raises NonFiniteError, or TypeError for a value that is not a number.
    """
    step = row["step"]
    if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
        raise TypeError(f"step must be an int >= 0, got {step!r}")
    clean: Row = {"step": int(step)}
    for key in sorted(key for key in row if key != "step"):
        clean[key] = _clean_value(key, row[key], int(step))
    return clean


def _clean_value(key: str, value: Any, step: int) -> MetricValue:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"metric {key} must be a number or None, got {type(value).__name__}")
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(
            f"metric {key} of step {step}: got {number}, expected a finite number; the row of this step was not written"
        )
    return number


def read_metrics(path: Path) -> list[Row]:
    """Returns the rows of a `metrics.jsonl` (or of its run folder) in order, without an incomplete last line.

    Returns [] if there is no file. Raises DataError with file and line of a malformed row.
    """
    if path.is_dir():
        path = path / METRICS_FILE
    return _checked(parse_lines(complete_lines(path), path), path)


def truncate_metrics(run_dir: Path, step: int) -> int:
    """Atomically remove the rows of steps > `step` from `metrics.jsonl`. Returns the number of removed rows."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    rows = _checked(parse_lines(complete_lines(path), path), path)
    keep: int = sum(row["step"] <= step for row in rows)
    last = rows[keep - 1]["step"] if keep else None
    if last != step and step > 0:
        logger.warning("%s ends at step %s, before the checkpoint's step %d: its curves have a gap", path, last, step)
    kept = [line + b"\n" for line in islice(complete_lines(path), keep)]  # the same bytes, not formatted again
    if path.stat().st_size != sum(map(len, kept)):
        write_atomically(path, kept)
    return len(rows) - keep


def _checked(records: Iterable[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(records, start=1):
        step = row.get("step")
        before = rows[-1]["step"] if rows else -1
        if type(step) is not int or not before < step < 2**53:
            raise DataError(f"{path}:{number}: expected an int step after {before}, got {step!r}; delete the line")
        rows.append(row)
    return rows
