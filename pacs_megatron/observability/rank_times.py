"""Seconds of every rank in the phases of a step (`observability.step_times`), and who waits for
whom.

`profile/rank_times.jsonl` has one JSON object a step: `step`, and `ranks`, for each rank a mapping
of a span's path (`update/forward_backward`) to its seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pacs_megatron.errors import DataError
from pacs_megatron.runtime.files import (
    complete_lines,
    json_line,
    naming,
    parse_lines,
    write_atomically,
)
from pacs_megatron.runtime.run_folder import PROFILE_FOLDER

FILE = "rank_times.jsonl"
Seconds = Mapping[str, float]
"""Path of a span -> seconds of one rank in one step"""

_WAIT = "reduce"
"""Span in which a rank waits for the others: the reduction of gradients"""
_GENERATE = "generate"
"""Span of a rank's own sampling; the rest of its phase is a wait"""
_SAMPLING_PHASES = ("rollout", "evaluation")


def span_seconds(times: Mapping[str, float]) -> dict[str, float]:
    """Path -> seconds, from the keys `time/<path>_s` of `Timer.take`."""
    return {key.removeprefix("time/").removesuffix("_s"): value for key, value in times.items()}


def append_rank_times(run_dir: Path, step: int, ranks: Sequence[Seconds]) -> None:
    """Adds the row of a step."""
    path = _path(run_dir)
    path.parent.mkdir(exist_ok=True)
    with naming(path), path.open("ab") as file:
        file.write(json_line({"step": step, "ranks": list(ranks)}))


def truncate_rank_times(run_dir: Path, step: int) -> None:
    """Removes the rows of steps > `step` and an incomplete last line."""
    path = _path(run_dir)
    if not path.exists():
        return
    rows = [row for row in read_rank_times(run_dir) if row["step"] <= step]
    write_atomically(path, [json_line(row) for row in rows])


def read_rank_times(run_dir: Path) -> list[dict[str, Any]]:
    """The rows in order; [] without a file.

    Raises:
        DataError: a row is malformed, with file and line.
    """
    path = _path(run_dir)
    rows = list(parse_lines(complete_lines(path), path))
    for number, row in enumerate(rows, start=1):
        ranks = row.get("ranks")
        is_valid = isinstance(row.get("step"), int) and isinstance(ranks, list) and bool(ranks)
        if not is_valid or not all(_is_seconds(times) for times in ranks or ()):
            raise DataError(f"{path}:{number}: expected step and ranks; delete the line")
    return rows


def _is_seconds(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(seconds, int | float) for seconds in value.values())


def _path(run_dir: Path) -> Path:
    return run_dir / PROFILE_FOLDER / FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWait:
    """Means over the steps that have this phase."""

    phase: str
    seconds: float
    """of the phase, on the rank that is longest in it"""
    slowest: int | None
    """the rank that most often works longest; None: the ranks wait for servers or rewards"""
    slowest_frac: float
    """share of the steps in which it does"""
    work_s: float
    """work of the longest rank of each step"""
    wait_s: float
    """time that the other ranks wait for it, mean over them (without one: all ranks)"""


def waits_of(rows: Sequence[Mapping[str, Any]]) -> list[PhaseWait]:
    """Who waits for whom, by phase, the longest wait first.

    A rank works in a phase except in the reduction of gradients, and of sampling only in its own
    generation. The ranks that have finished wait for the one that works longest.

    Args:
        rows: from `read_rank_times`.
    """
    phases: set[str] = set()
    for row in rows:
        for times in row["ranks"]:
            phases.update(path for path in times if "/" not in path and path != "step")

    waits = [_wait_of(phase, rows) for phase in sorted(phases)]
    return sorted(waits, key=lambda wait: -wait.wait_s)


def _wait_of(phase: str, rows: Sequence[Mapping[str, Any]]) -> PhaseWait:
    totals: list[float] = []
    works: list[float] = []
    waits: list[float] = []
    slowest: list[int] = []
    for row in rows:
        total = max(float(times.get(phase, 0.0)) for times in row["ranks"])
        if not total:
            continue
        work = [_work_s(times, phase) for times in row["ranks"]]
        longest = max(work)
        totals.append(total)
        works.append(longest)
        if longest > 0:
            slowest.append(work.index(longest))
            num_others = max(len(work) - 1, 1)
            waits.append(sum(longest - one for one in work) / num_others)
        else:
            waits.append(total)

    number = max(set(slowest), key=slowest.count) if slowest else None
    return PhaseWait(
        phase=phase,
        seconds=fmean(totals),
        slowest=number,
        slowest_frac=slowest.count(number) / len(totals) if number is not None else 1.0,
        work_s=fmean(works),
        wait_s=fmean(waits),
    )


def _work_s(times: Seconds, phase: str) -> float:
    """Seconds that a rank works in the phase."""
    if phase in _SAMPLING_PHASES:
        return times.get(f"{phase}/{_GENERATE}", 0.0)
    waited = 0.0
    for path, seconds in times.items():
        if path.startswith(f"{phase}/") and path.rpartition("/")[2] == _WAIT:
            waited += seconds
    return max(times.get(phase, 0.0) - waited, 0.0)
