"""`status`, `logs`, `cancel` and `export` of a run folder."""

import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from pacs_megatron.checkpoint.names import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    Position,
    newest_position,
    newest_step,
)
from pacs_megatron.errors import ConfigError, DataError, ExitCode
from pacs_megatron.launch.job import (
    CANCEL_FILE,
    LATEST,
    JobRow,
    job_states,
    known_jobs,
    read_attempts,
)
from pacs_megatron.runtime.files import read_rows
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import (
    EXIT_CODE_FILE,
    HEARTBEAT_FOLDER,
    METRICS_FILE,
    PROMPTS_FILE,
    near_run,
    read_exit_code,
)
from pacs_megatron.runtime.run_lock import LOCK_FILE, RunLock, last_lease, lock_owner
from pacs_megatron.runtime.waiting import report_wait, run_program

LOG_NAME = "output.log"
_MAX_LINES = 10**6
_PASS_AT_1 = re.compile(r"eval/(.+)/pass@1")
_MAX_LETTERS = 2**16
"""Characters of a log that are read at once; a longer line is printed in pieces."""


def _check(run_dir: Path) -> None:
    if not (run_dir / "config.yaml").is_file() and not (run_dir / "logs").is_dir():
        raise ConfigError(
            f"{run_dir} has neither config.yaml nor logs/; give a run folder, such as "
            f"runs/quickstart{near_run(run_dir)}"
        )


def status(run_dir: Path) -> str:
    """The state of a run: jobs, attempts, phases of the ranks, newest checkpoint, last metrics."""
    _check(run_dir)
    attempts = read_attempts(run_dir)
    names = known_jobs(run_dir)
    queued = job_states(list(names))
    lines = [f"run        {run_dir}", f"state      {_state(run_dir, attempts, queued)}"]
    lines += [_attempt_line(row, queued) for row in attempts]

    running = {str(row["job_id"]) for row in attempts if "end" not in row}
    for job_id, state in queued.items():
        if job_id not in running:
            lines.append(f"job {job_id} ({names[job_id]}): {state}")

    lines += _heartbeats(run_dir, _last_change(run_dir, attempts))
    lines.append(f"checkpoint {newest_position(run_dir) or 'none yet'}")
    lines += _last_metrics(run_dir)
    lines += _evaluations(run_dir)
    lines += [f"notice     {line}" for line in _notices(run_dir)]
    if (run_dir / "STOP").exists():
        lines.append("stop       requested (STOP); the run saves and stops")
    return "\n".join(lines)


def _notices(run_dir: Path) -> list[str]:
    """The notices of the last attempt about its data; none of an earlier release."""
    try:
        notices = read_object(run_dir / PROMPTS_FILE)["notices"]
    except (DataError, KeyError):
        return []
    return [str(line) for line in notices] if isinstance(notices, list) else []


def _state(run_dir: Path, attempts: list[JobRow], queued: dict[str, str]) -> str:
    """`running`, `waiting`, `done`, `stopped`, `failed`, `dead` or `not started`, and why."""
    held = last_lease(run_dir)
    lease, is_alive = held or (None, False)
    if lease is not None and is_alive and lease.command == "train":
        return f"running: {lease}"

    jobs = [f"job {job_id} {state}" for job_id, state in queued.items()]
    if any(" RUNNING" in job for job in jobs):
        return f"running: {', '.join(jobs)}"
    if jobs:
        return f"waiting: {', '.join(jobs)}"

    # A writer that ends releases the lock, and writes its exit code after its last heartbeat.
    code_file = run_dir / EXIT_CODE_FILE
    has_code = code_file.is_file()
    if lease is not None and lease.command == "train":
        last_beat = (run_dir / LOCK_FILE).stat().st_mtime
        has_code = has_code and code_file.stat().st_mtime >= last_beat
        if not has_code:
            return f"dead: {lease} ended without an exit code (killed, or its host failed)"
    # A file that is older than the last job's begin or end is of an earlier attempt.
    if has_code and code_file.stat().st_mtime >= _last_change(run_dir, attempts):
        return _ending(read_exit_code(code_file, ExitCode.FAILED))
    if attempts and "end" in attempts[-1]:
        return _ending(int(attempts[-1]["code"]))
    if attempts:
        return f"dead: attempt {attempts[-1]['attempt']} ended without an exit code"
    return "not started, or it failed before training; see the log"


def _ending(code: int) -> str:
    """The state of a run whose last attempt ended with `code`."""
    if code == ExitCode.OK:
        return "done"
    if code == ExitCode.PREEMPTED:
        return "stopped: saved after a stop request; the same command continues"
    names = {int(known): known.name.lower() for known in ExitCode}
    return f"failed: exit code {code} ({names.get(code, 'unknown')}); `logs` prints the cause"


def _attempt_line(row: JobRow, queued: dict[str, str]) -> str:
    """How an attempt ended, or the state of its job in the queue."""
    job_id = str(row["job_id"])
    outcome = queued.get(job_id, "ended without an exit code (node failure, or killed)")
    if "end" in row:
        minutes = (float(row["end"]) - float(row["begin"])) / 60
        code_names = {int(code): code.name.lower() for code in ExitCode}
        end = code_names.get(int(row["code"]), f"code {row['code']}")
        outcome = f"{end} after {minutes:.1f} min, step {row['begin_step']} -> {row['end_step']}"
    return f"attempt {row['attempt']}  job {job_id}: {outcome}"


def _last_change(run_dir: Path, attempts: list[JobRow]) -> float:
    """Time of the last begin or end of an attempt, to ignore older heartbeats."""
    times = [0.0]
    code_file = run_dir / EXIT_CODE_FILE
    if code_file.exists():
        times.append(code_file.stat().st_mtime)
    if attempts:
        latest = attempts[-1]
        times.append(float(latest.get("end", latest["begin"])))
    return max(times)


def _heartbeats(run_dir: Path, since: float) -> list[str]:
    """One line per phase: its ranks, and the longest time without progress among them."""
    beats_of: dict[str, list[tuple[int, float]]] = {}
    for path in (run_dir / HEARTBEAT_FOLDER).glob("rank*.json"):
        try:
            state = read_object(path)
            written = path.stat().st_mtime
            rank = int(state["rank"])
            silent_s = float(state["silent_s"]) + time.time() - written
            phase = str(state["phase"])
        except (DataError, OSError, ValueError, TypeError, KeyError):
            continue  # replaced during the read, or partial
        if written >= since:
            beats_of.setdefault(phase, []).append((rank, silent_s))

    lines = []
    for phase, beats in sorted(beats_of.items(), key=lambda item: min(item[1])):
        ranks = _ranges([rank for rank, _ in beats])
        longest_s = max(silent_s for _, silent_s in beats)
        lines.append(f"ranks      {ranks}: {phase}, no progress for at most {duration(longest_s)}")
    return lines


def _ranges(numbers: list[int]) -> str:
    """`0-3, 6` of 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _last_metrics(run_dir: Path) -> list[str]:
    """A line on the last row of metrics; none before the first step."""
    path = run_dir / METRICS_FILE
    rows = read_rows(path, {"step": int})
    if not rows:
        return []
    row = rows[-1]
    age_s = time.time() - path.stat().st_mtime
    names = ("reward/mean", "objective/loss", "optimizer/grad_norm", "tokens_per_s")
    numbers = {name: row[name] for name in names if isinstance(row.get(name), int | float)}
    values = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
    return [f"metrics    step {row['step']}, {duration(age_s)} ago: {values}"]


def _evaluations(run_dir: Path) -> list[str]:
    """A line for each benchmark: pass@1 of its last evaluation, and of its first."""
    measured: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(run_dir / METRICS_FILE, {"step": int}):
        for key, value in row.items():
            match = _PASS_AT_1.fullmatch(key)
            if match and isinstance(value, int | float):
                measured.setdefault(match[1], []).append((row["step"], value))

    lines = []
    for name, values in measured.items():
        step, last = values[-1]
        first_step, first = values[0]
        start = f", {first:.4f} at step {first_step}" if len(values) > 1 else ""
        lines.append(f"pass@1     {name}: {last:.4f} at step {step}{start}")
    return lines


def duration(seconds: float) -> str:
    """A time to read: `43 s`, `12 min`, `5.2 h`, `3.4 days`.

    A negative one, after the clock was set back, is `0 s`.
    """
    for unit_s, unit in ((86400, "days"), (3600, "h")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{max(seconds, 0.0):.0f} s"


def log_lines(run_dir: Path, attempt: int | None, num_lines: int, *, follow: bool) -> Iterator[str]:
    """The last lines of an attempt's log.

    Args:
        run_dir: folder of the run.
        attempt: number of the attempt; None: the latest.
        num_lines: number of lines.
        follow: then also yields new lines as they are written, and does not end.

    Raises:
        ConfigError: there is no log.
    """
    _check(run_dir)
    path = _log_file(run_dir, attempt)
    with path.open(encoding="utf-8", errors="replace") as file:
        # A character has at most 4 bytes.
        num_bytes = 4 * _MAX_LETTERS * num_lines
        file.seek(max(0, path.stat().st_size - num_bytes))
        pieces = iter(lambda: file.readline(_MAX_LETTERS), "")
        for line in deque(pieces, min(num_lines, _MAX_LINES)):
            yield line.rstrip("\n")
        while follow:
            yield _next_line(file, path).rstrip("\n")


def _log_file(run_dir: Path, attempt: int | None) -> Path:
    """The log of an attempt; for the latest also that of a run without a batch script."""
    logs = run_dir / "logs"
    folder = logs / (LATEST if attempt is None else f"attempt_{attempt}")
    candidates = [folder / LOG_NAME]
    if attempt is None:
        candidates.append(logs / "rank0.log")
    for path in candidates:
        if path.is_file():
            return path
    raise ConfigError(
        f"no log in {folder} or {logs}; `pacs-megatron status {run_dir}` shows the attempts"
    )


def _next_line(file: TextIO, path: Path) -> str:
    """Waits for the next line of a log."""
    line = file.readline()
    if line:
        return line
    with report_wait(f"for new lines of {path}"):
        while True:
            line = file.readline()
            if line:
                return line
            time.sleep(0.5)


def cancel(run_dir: Path, *, save: bool) -> str:
    """Cancels all jobs of a run, pending ones too.

    With `save`, requests a save and stop instead.
    """
    _check(run_dir)
    jobs = list(known_jobs(run_dir))
    states = job_states(jobs)
    if save:
        return _save_and_stop(run_dir, states)
    if not states:
        raise ConfigError(
            f"{run_dir} has no job in the queue (known: {', '.join(jobs) or 'none'}); nothing to "
            "cancel"
        )
    _scancel(list(states))
    return f"cancelled {', '.join(states)}"


def _save_and_stop(run_dir: Path, states: dict[str, str]) -> str:
    """Cancels pending jobs and requests the running one to save and stop.

    `states` are those of the run's jobs in the queue.
    """
    pending = [job_id for job_id, state in states.items() if state.startswith("PENDING")]
    if pending:
        _scancel(pending)
        if len(pending) == len(states):
            return f"cancelled {', '.join(pending)}; no job was running, so nothing was saved"
    if not states and _has_ended(run_dir):
        raise ConfigError(f"no job and no process runs in {run_dir}; nothing to cancel")
    (run_dir / CANCEL_FILE).touch()
    (run_dir / "STOP").touch()
    return (
        f"requested {run_dir} to save and stop, without a requeue; see "
        f"`pacs-megatron status {run_dir}`"
    )


def _has_ended(run_dir: Path) -> bool:
    """Whether every attempt has ended and no process trains the run."""
    all_ended = all("end" in row for row in read_attempts(run_dir))
    return all_ended and lock_owner(run_dir) is None


def _scancel(jobs: list[str]) -> None:
    done = run_program(["scancel", *jobs])
    if done.returncode:
        raise ConfigError(f"scancel {' '.join(jobs)}: {done.stderr.strip()}")


@report_wait("for the libraries to load and the export to end")
def export(
    run_dir: Path,
    *,
    step: int | None,
    out: Path | None,
    verify: bool = True,
    push: str | None = None,
    public: bool = False,
) -> str:
    """Writes the weights of a checkpoint for Hugging Face, and beside them the critic's weights or
    the adapters, as PEFT's folder.

    Args:
        run_dir: folder of the run.
        step: step of the checkpoint; None: the newest.
        out: target folder; None: in the run folder.
        verify: whether to compare the checkpoint's files with its digests.
        push: repository of the hub, `owner/name`, that receives the export; None: none.
        public: whether a repository that `push` creates is public.

    Returns:
        The lines to print.

    Raises:
        ConfigError: there is no such checkpoint, the hub does not take the upload, or `out` is None
            and the run folder is in use.
        CheckpointError, ConversionError: the checkpoint is not readable.
    """
    from pacs_megatron.checkpoint.adapters import LoraFacts
    from pacs_megatron.convert.convert import (
        ConversionOptions,
        export_adapters,
        megatron_to_hf,
    )
    from pacs_megatron.launch.push import check_repository
    from pacs_megatron.launch.push import push as upload
    from pacs_megatron.observability.logs import setup_command_logging

    if push is not None:
        check_repository(push)
    newest = newest_step(run_dir)
    if newest is None:
        raise ConfigError(
            f"{run_dir} has no checkpoint of a completed step in {CHECKPOINTS_FOLDER}/; give the "
            f"folder of a run with one{near_run(run_dir)}"
        )
    chosen = Position(newest if step is None else step)
    folder = run_dir / CHECKPOINTS_FOLDER / chosen.name
    if not (folder / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{folder} does not exist or is incomplete; the newest checkpoint is step {newest}"
        )

    target = out if out is not None else run_dir / "hf_exports" / chosen.name
    setup_command_logging()
    # A target outside the run folder needs no lock, because reading a run is always allowed.
    with RunLock(run_dir, "export") if out is None else nullcontext():
        targets = {folder: target}
        if (folder / "critic" / MANIFEST_NAME).is_file():
            targets[folder / "critic"] = target.with_name(f"{target.name}_critic")
        lines = []
        for source, source_target in targets.items():
            options = ConversionOptions(out=source_target, verify_source=verify)
            lines.append(megatron_to_hf(source, options, step=None))
        if LoraFacts.read(folder) is not None:
            adapters = target.with_name(f"{target.name}_adapters")
            lines.append(export_adapters(folder, adapters, verify=verify))
        if push is not None:
            lines.append(upload(target, push, run_dir, is_public=public))
        return "\n".join(lines)
