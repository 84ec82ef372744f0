"""`status`, `logs` and `cancel` of a run's folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.launch.job import CANCEL_FILE, LATEST, latest_step, read_attempts

LOG_NAME = "output.log"


def _check(run_dir: Path) -> None:
    if not (run_dir / "config.yaml").is_file() and not (run_dir / "logs").is_dir():
        raise ConfigError(f"{run_dir}: no config.yaml and no logs/ in it; give a run's folder, such as runs/quickstart")


def job_states(job_ids: list[str]) -> dict[str, str]:
    """State of the jobs that Slurm still knows of, by id; empty without Slurm."""
    if not job_ids or shutil.which("squeue") is None:
        return {}
    done = subprocess.run(
        ["squeue", "-h", "-j", ",".join(job_ids), "-o", "%i %T %M %R"], capture_output=True, text=True, check=False
    )
    return {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}


def status(run_dir: Path) -> str:
    """Attempts, the job's state, the newest checkpoint and the last row of metrics."""
    _check(run_dir)
    lines = [f"run        {run_dir}"]
    attempts = read_attempts(run_dir)
    jobs = job_states(sorted({str(row["job_id"]) for row in attempts if row["job_id"] != "none"}))
    for row in attempts:
        if "end" in row:
            minutes = (float(row["end"]) - float(row["begin"])) / 60
            outcome = (
                f"{_word(int(row['code']))} after {minutes:.1f} min, step {row['begin_step']} -> {row['end_step']}"
            )
        else:
            outcome = jobs.get(str(row["job_id"]), "ended without a word (node failure, or killed)")
        lines.append(f"attempt {row['attempt']}  job {row['job_id']}: {outcome}")
    lines.extend(f"job {job}: {state}" for job, state in jobs.items() if attempts and "end" in attempts[-1])
    lines.append(f"checkpoint step {latest_step(run_dir)}" if latest_step(run_dir) >= 0 else "checkpoint none yet")
    lines.extend(_last_metrics(run_dir))
    if (run_dir / "STOP").exists():
        lines.append("stop       asked for (STOP); it saves and ends")
    return "\n".join(lines)


def _word(code: int) -> str:
    try:
        return ExitCode(code).name.lower()
    except ValueError:
        return f"code {code}"


def _last_metrics(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = path.read_text(encoding="utf-8").splitlines()
    if not rows:
        return []
    row = json.loads(rows[-1])
    age = time.time() - path.stat().st_mtime
    names = ("reward/mean", "objective/loss", "optimizer/grad_norm", "tokens_per_s")
    values = ", ".join(f"{name} {row[name]:.4g}" for name in names if isinstance(row.get(name), int | float))
    return [f"metrics    step {row['step']}, {age:.0f} s ago: {values}"]


def log_lines(run_dir: Path, attempt: int | None, num_lines: int, *, follow: bool) -> Iterator[str]:
    """The end of an attempt's log (default: the latest), then what is added to it while `follow`."""
    _check(run_dir)
    folder = run_dir / "logs" / (LATEST if attempt is None else f"attempt_{attempt}")
    candidates = [folder / LOG_NAME, run_dir / "logs" / "rank0.log"]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise ConfigError(
            f"no log in {folder} or {run_dir / 'logs'}; `pacs-megatron status {run_dir}` shows the attempts"
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (line.rstrip("\n") for line in file.readlines()[-num_lines:])
        while follow:
            line = file.readline()
            if line:
                yield line.rstrip("\n")
            else:
                time.sleep(0.5)


def cancel(run_dir: Path, *, save: bool) -> str:
    """End a run's jobs: with `save` ask it to save and stop first (it ends by itself), else cancel now."""
    _check(run_dir)
    if save:
        (run_dir / CANCEL_FILE).touch()
        (run_dir / "STOP").touch()
        return f"asked {run_dir} to save and stop; it is not requeued; `pacs-megatron status {run_dir}` shows it"
    jobs = sorted({str(row["job_id"]) for row in read_attempts(run_dir) if row["job_id"] != "none"})
    alive = list(job_states(jobs))
    if not alive:
        raise ConfigError(f"{run_dir} has no job in the queue (known: {', '.join(jobs) or 'none'}); nothing to cancel")
    done = subprocess.run(["scancel", *alive], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"scancel {' '.join(alive)}: {done.stderr.strip()}")
    return f"cancelled {', '.join(alive)}"
