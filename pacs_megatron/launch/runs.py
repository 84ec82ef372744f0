"""`status`, `logs`, `cancel` and `export` of a run folder."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

from pacs_megatron.checkpoint.names import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    Position,
    newest_position,
    newest_step,
)
from pacs_megatron.errors import ConfigError, DataError, ExitCode
from pacs_megatron.launch.job import CANCEL_FILE, LATEST, Row, job_states, known_jobs, read_attempts
from pacs_megatron.runtime.files import read_rows
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import EXIT_CODE_FILE, HEARTBEAT_FOLDER, METRICS_FILE
from pacs_megatron.runtime.run_lock import RunLock, lock_owner
from pacs_megatron.runtime.waiting import report_wait, run_program

LOG_NAME = "output.log"
_MAX_LINES = 10**6
_MAX_LETTERS = 2**16
"""Bytes of a log that are read at once; a longer line is printed in pieces."""


def _check(run_dir: Path) -> None:
    if not (run_dir / "config.yaml").is_file() and not (run_dir / "logs").is_dir():
        raise ConfigError(
            f"{run_dir} has neither config.yaml nor logs/; give a run folder, such as "
            "runs/quickstart"
        )


def status(run_dir: Path) -> str:
    """Jobs in the queue, attempts, phase of each rank, newest checkpoint and last row of metrics."""
    _check(run_dir)
    lines = [f"run        {run_dir}"]
    attempts = read_attempts(run_dir)
    known = known_jobs(run_dir)
    queued = job_states(list(known))
    lines.extend(_attempt_line(row, queued) for row in attempts)
    running = {str(row["job_id"]) for row in attempts if "end" not in row}
    lines.extend(
        f"job {job} ({known[job]}): {state}" for job, state in queued.items() if job not in running
    )
    lines.extend(_heartbeats(run_dir, _last_change(run_dir, attempts)))
    lines.append(f"checkpoint {newest_position(run_dir) or 'none yet'}")
    lines.extend(_last_metrics(run_dir))
    if (run_dir / "STOP").exists():
        lines.append("stop       requested (STOP); the run saves and stops")
    return "\n".join(lines)


def _attempt_line(row: Row, queued: dict[str, str]) -> str:
    outcome = queued.get(str(row["job_id"]), "ended without an exit code (node failure, or killed)")
    if "end" in row:
        minutes = (float(row["end"]) - float(row["begin"])) / 60
        names = {int(code): code.name.lower() for code in ExitCode}
        end = names.get(int(row["code"]), f"code {row['code']}")
        outcome = f"{end} after {minutes:.1f} min, step {row['begin_step']} -> {row['end_step']}"
    return f"attempt {row['attempt']}  job {row['job_id']}: {outcome}"


def _last_change(run_dir: Path, attempts: list[Row]) -> float:
    """Time of the last begin or end of an attempt, to ignore older heartbeats."""
    code_file = run_dir / EXIT_CODE_FILE
    times = [code_file.stat().st_mtime] if code_file.exists() else []
    times.extend(float(row.get("end", row["begin"])) for row in attempts[-1:])
    return max(times, default=0.0)


def _heartbeats(run_dir: Path, since: float) -> list[str]:
    """One line per phase: its ranks, and the longest time without progress among them."""
    phases: dict[str, list[tuple[int, float]]] = {}
    for path in (run_dir / HEARTBEAT_FOLDER).glob("rank*.json"):
        try:
            state = read_object(path)
            written = path.stat().st_mtime
            beat = int(state["rank"]), float(state["silent_s"]) + time.time() - written
            phase = str(state["phase"])
        except (DataError, OSError, ValueError, TypeError, KeyError):
            continue  # replaced during the read, or partial
        if written >= since:
            phases.setdefault(phase, []).append(beat)
    return [
        f"ranks      {_ranges([rank for rank, _ in found])}: {phase}, no progress for at most "
        f"{max(silent_s for _, silent_s in found):.0f} s"
        for phase, found in sorted(phases.items(), key=lambda item: min(item[1]))
    ]


def _ranges(numbers: list[int]) -> str:
    """`0-3, 6` of 0, 1, 2, 3, 6."""
    runs = (
        list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    )
    return ", ".join(
        f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs
    )


def _last_metrics(run_dir: Path) -> list[str]:
    path = run_dir / METRICS_FILE
    rows = read_rows(path, {"step": int})
    if not rows:
        return []
    row = rows[-1]
    age = time.time() - path.stat().st_mtime
    names = ("reward/mean", "objective/loss", "optimizer/grad_norm", "tokens_per_s")
    values = ", ".join(
        f"{name} {row[name]:.4g}" for name in names if isinstance(row.get(name), int | float)
    )
    return [f"metrics    step {row['step']}, {age:.0f} s ago: {values}"]


def log_lines(run_dir: Path, attempt: int | None, num_lines: int, *, follow: bool) -> Iterator[str]:
    """The last lines of an attempt's log (default: the latest); with `follow`, new lines as they
    are written.
    """
    _check(run_dir)
    folder = run_dir / "logs" / (LATEST if attempt is None else f"attempt_{attempt}")
    candidates = [folder / LOG_NAME, *([run_dir / "logs" / "rank0.log"] if attempt is None else [])]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise ConfigError(
            f"no log in {folder} or {folder.parent}; `pacs-megatron status {run_dir}` shows the "
            "attempts"
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(
            max(0, path.stat().st_size - 4 * _MAX_LETTERS * num_lines)
        )  # a character has at most 4 bytes
        pieces = iter(lambda: file.readline(_MAX_LETTERS), "")
        yield from (line.rstrip("\n") for line in deque(pieces, min(num_lines, _MAX_LINES)))
        while follow:
            line = file.readline()
            if not line:
                with report_wait(f"for new lines of {path}"):
                    while not (line := file.readline()):
                        time.sleep(0.5)
            yield line.rstrip("\n")


def cancel(run_dir: Path, *, save: bool) -> str:
    """Cancels all jobs of a run, pending ones too. With `save`, requests a save and stop instead."""
    _check(run_dir)
    jobs = list(known_jobs(run_dir))
    alive = job_states(jobs)
    if save:
        waiting = [job for job, state in alive.items() if state.startswith("PENDING")]
        if waiting:
            _scancel(waiting)
            if len(waiting) == len(alive):
                return f"cancelled {', '.join(waiting)}; no job was running, so nothing was saved"
        if (
            not alive
            and all("end" in row for row in read_attempts(run_dir))
            and lock_owner(run_dir) is None
        ):
            raise ConfigError(f"no job and no process runs in {run_dir}; nothing to cancel")
        (run_dir / CANCEL_FILE).touch()
        (run_dir / "STOP").touch()
        return f"requested {run_dir} to save and stop, without a requeue; see `pacs-megatron status {run_dir}`"
    if not alive:
        raise ConfigError(
            f"{run_dir} has no job in the queue (known: {', '.join(jobs) or 'none'}); nothing to "
            "cancel"
        )
    _scancel(list(alive))
    return f"cancelled {', '.join(alive)}"


def _scancel(jobs: list[str]) -> None:
    done = run_program(["scancel", *jobs])
    if done.returncode:
        raise ConfigError(f"scancel {' '.join(jobs)}: {done.stderr.strip()}")


def export(run_dir: Path, *, step: int | None, out: Path | None, verify: bool = True) -> str:
    """Writes the weights of `step` (default: the newest checkpoint) to `out`, and the critic's
    weights beside it.

    Returns the lines to print. Raises ConfigError without a checkpoint, or if `out` is None and the
    run folder is in use, and CheckpointError or ConversionError for an unreadable checkpoint.
    """
    from pacs_megatron.convert.convert import Options, megatron_to_hf
    from pacs_megatron.observability.logs import setup_logging

    newest = newest_step(run_dir)
    if newest is None:
        raise ConfigError(
            f"{run_dir} has no checkpoint of a completed step in {CHECKPOINTS_FOLDER}/; give the "
            "folder of a run with one"
        )
    chosen = Position(newest if step is None else step)
    folder = run_dir / CHECKPOINTS_FOLDER / chosen.name
    if not (folder / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{folder} does not exist or is incomplete; the newest checkpoint is step {newest}"
        )
    target = out if out is not None else run_dir / "hf_exports" / chosen.name
    setup_logging(None, 0)
    # A target outside the run folder needs no lock, because reading a run is always allowed.
    with RunLock(run_dir, "export") if out is None else nullcontext():
        sources = {folder: target}
        if (folder / "critic" / MANIFEST_NAME).is_file():
            sources[folder / "critic"] = target.with_name(f"{target.name}_critic")
        options = {source: Options(out=to, verify_source=verify) for source, to in sources.items()}
        return "\n".join(
            megatron_to_hf(source, option, step=None) for source, option in options.items()
        )
