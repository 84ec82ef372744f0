"""Commands for batch scripts: `python -m pacs_megatron.launch.job describe | begin | urls | end`.

A run is a chain of attempts (Slurm jobs, or requeues of one job). `begin` opens an attempt's
folder. `end` closes it and requeues the job, except after success, an invalid configuration, or
several attempts without progress.
"""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.checkpoint.names import Position, newest_position
from pacs_megatron.config import load_config
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.config.rollout_options import SglangServers
from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.launch.serve import servers_here, wait_for_urls
from pacs_megatron.launch.train import check_model_and_layout
from pacs_megatron.runtime.command_line import run_command
from pacs_megatron.runtime.files import has_fields, json_line, read_rows, write_atomically
from pacs_megatron.runtime.run_folder import (
    EXIT_CODE_FILE,
    FAILED_RANK_FILE,
    read_exit_code,
    run_folder,
)
from pacs_megatron.runtime.waiting import report_wait, run_program

ATTEMPTS_FILE = "attempts.jsonl"
JOBS_FILE = "jobs.jsonl"
"""One row per job that `submit` put into the queue."""
LATEST = "latest"
KILLED_WITHIN_S = 120.0
"""Seconds that a requeued job's script waits for Slurm to end it.

The script must not exit earlier.
"""
CANCEL_FILE = "CANCEL"
"""File that `cancel --save` writes beside STOP.

The run then saves, stops and is not requeued.
"""
JobRow = dict[str, float | int | str]
"""One attempt, or one submitted job."""
_BEGUN = {"attempt": int, "job_id": str | int, "begin": int | float, "begin_step": int}
_ENDED = {"end": int | float, "code": int, "end_step": int}


def describe(config_path: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Shell variables of a run for its batch script.

    Raises:
        ConfigError: the configuration is not valid.
    """
    loaded = load_config(config_path, overrides)
    config = loaded.config
    world_size = ranks_to_start(config)
    check_model_and_layout(loaded, world_size)
    resources = config.resources
    if resources.rollout_nodes:
        servers_here(config)

    sglang = config.rollout.sglang
    return {
        "RUN_DIR": str(run_folder(loaded)),
        "TRAIN_NODES": str(resources.nodes),
        "ROLLOUT_NODES": str(resources.rollout_nodes),
        "RANKS_PER_NODE": str(world_size // resources.nodes),
        "GPUS_PER_NODE": str(resources.gpus_per_node),
        "SYNC_TRANSPORT": "none" if sglang is None else sglang.sync.transport,
        **_describe_servers(config.rollout.managed_servers),
        "TIME_LIMIT": resources.time_limit,
        "SIGNAL_LEAD_S": str(resources.signal_lead_s),
        "MAX_ATTEMPTS": str(resources.max_attempts),
    }


def _describe_servers(servers: SglangServers | None) -> dict[str, str]:
    """GPUs and memory of a server without a trainer beside it, and the timeout of its start."""
    if servers is None:
        return {"SERVER_GPUS": "0", "SERVER_MEMORY": "null", "SERVER_TIMEOUT_S": "0"}
    memory = None if servers.colocated else servers.mem_fraction
    return {
        "SERVER_GPUS": str(servers.tp if servers.device == "cuda" else 0),
        "SERVER_MEMORY": "null" if memory is None else str(memory),
        "SERVER_TIMEOUT_S": str(servers.start_timeout_s),
    }


def begin(run_dir: Path, job_id: str) -> Path:
    """Opens the next attempt and returns its log folder.

    Raises:
        ConfigError: another job trains this run.
    """
    rows = read_attempts(run_dir)
    if rows and "end" not in rows[-1]:
        _check_ended(run_dir, str(rows[-1]["job_id"]), job_id)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name in ("STOP", CANCEL_FILE, FAILED_RANK_FILE):
        (run_dir / name).unlink(missing_ok=True)

    attempt = len(rows) + 1
    folder = logs / f"attempt_{attempt}"
    folder.mkdir(exist_ok=True)
    # `replace` exchanges the link at once, so that a reader always finds one.
    beside = logs / f".{LATEST}.{os.getpid()}"
    beside.symlink_to(folder.name)
    beside.replace(logs / LATEST)

    row: JobRow = {
        "attempt": attempt,
        "job_id": job_id,
        "begin": time.time(),
        **_progress(run_dir, "begin"),
    }
    _append(run_dir, row, ATTEMPTS_FILE)
    return folder


def _check_ended(run_dir: Path, other: str, job_id: str) -> None:
    """Raises ConfigError if the job `other` still trains the run that `job_id` begins."""
    if other == job_id:
        return
    state = job_states([other]).get(other)
    if state is not None and not state.startswith("COMPLETING"):
        fix = f"`pacs-megatron cancel {run_dir}` first, or choose another run.name"
        raise ConfigError(f"{run_dir} is being trained by job {other} ({state}); {fix}")


def end(run_dir: Path, code: int, max_attempts: int) -> tuple[int, bool, str]:
    """Closes the attempt.

    Rank 0's code in `<run>/exit_code`, or another rank's in `<run>/failed_rank`, has precedence
    over `code`, because srun reports the largest code of all ranks, also of ranks that it ended.

    Args:
        run_dir: folder of the run.
        code: exit code of srun.
        max_attempts: attempts in a row without progress after which the run is not requeued.

    Returns:
        (exit code, whether to requeue, reason).
    """
    rows = read_attempts(run_dir)
    if not rows:
        raise ConfigError(f"{run_dir}/logs/{ATTEMPTS_FILE} is empty; run `begin` before `end`")
    for file in (run_dir / FAILED_RANK_FILE, run_dir / EXIT_CODE_FILE):
        if file.is_file() and file.stat().st_mtime >= float(rows[-1]["begin"]):
            code = read_exit_code(file, code)
    rows[-1] |= {
        "end": time.time(),
        **_progress(run_dir, "end"),
        "code": code,
    }
    write_atomically(run_dir / "logs" / ATTEMPTS_FILE, map(json_line, rows))

    again, reason = _verdict(rows, code, max_attempts)
    if again and (run_dir / CANCEL_FILE).exists():
        again = False
        reason = "cancelled by `pacs-megatron cancel --save`"
    return code, again, reason


def _progress(run_dir: Path, when: str) -> JobRow:
    """Step of the newest checkpoint, and the number of updates of the next step in it.

    The step is -1 without a checkpoint. `when` is `begin` or `end`.
    """
    position = newest_position(run_dir) or Position(-1)
    return {f"{when}_step": position.step, f"{when}_updates": position.updates}


def _position(row: JobRow, when: str) -> Position:
    """Inverse of `_progress`."""
    # Rows of version 0.1 have no updates, because it saved between steps only.
    return Position(int(row[f"{when}_step"]), int(row.get(f"{when}_updates", 0)))


def _verdict(rows: Sequence[JobRow], code: int, max_attempts: int) -> tuple[bool, str]:
    """(whether to requeue, reason) after the last of these attempts ended with `code`."""
    if code == ExitCode.OK:
        return False, "done"
    if code == ExitCode.MISCONFIGURED:
        return False, "invalid configuration or data; see the log"

    idle = _attempts_without_progress(rows)
    if idle >= max_attempts:
        reason = (
            f"{idle} attempts in a row without a new checkpoint "
            f"(resources.max_attempts={max_attempts})"
        )
        return False, reason
    if code == ExitCode.PREEMPTED:
        return True, "stopped by a signal, and saved"
    position = max(_position(rows[-1], "end"), Position(0))
    return True, f"failed with code {code}; the next attempt resumes from {position}"


def _attempts_without_progress(rows: Sequence[JobRow]) -> int:
    """Number of the last attempts that wrote no new checkpoint."""
    idle = 0
    after = _position(rows[-1], "end")
    for row in reversed(rows):
        # An attempt on a lost node has no `end_step`, so this uses the begin of the next attempt.
        before = _position(row, "begin")
        if after > before:
            break
        after = before
        idle += 1
    return idle


def requeue(job_id: str) -> None:
    """Requeues the running job.

    Does nothing if a cancellation is in progress, which a requeue would undo.
    """
    state = run_program(["squeue", "-h", "-j", job_id, "-o", "%T"])
    if state.stdout.split()[:1] != ["RUNNING"]:
        return
    done = run_program(["scontrol", "requeue", job_id])
    if done.returncode:
        raise ConfigError(f"scontrol requeue {job_id}: {done.stderr.strip()}; submit the run again")
    with report_wait("for Slurm to end this job's script"):
        time.sleep(KILLED_WITHIN_S)


def job_states(job_ids: Sequence[str]) -> dict[str, str]:
    """Job id -> state, such as `RUNNING 1:02 n1`, of jobs in Slurm's queue; empty without Slurm."""
    if not job_ids or shutil.which("squeue") is None:
        return {}
    done = run_program(["squeue", "-h", "-j", ",".join(job_ids), "-o", "%i %T %M %R"])
    states: dict[str, str] = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if words:
            # 12+0 is the first component of the heterogeneous job 12.
            job_id = words[0].split("+")[0]
            states.setdefault(job_id, " ".join(words[1:]))
    return {job_id: states[job_id] for job_id in job_ids if job_id in states}


def note_jobs(run_dir: Path, jobs: Sequence[tuple[str, str]]) -> None:
    """Appends (name, job id) of submitted jobs to logs/jobs.jsonl."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for name, job_id in jobs:
        row: JobRow = {"name": name, "job_id": job_id, "submitted": time.time()}
        _append(run_dir, row, JOBS_FILE)


def known_jobs(run_dir: Path) -> dict[str, str]:
    """Job id -> name of all jobs of this run, oldest first."""
    submitted = read_rows(run_dir / "logs" / JOBS_FILE, {"name": str, "job_id": str | int})
    names = {str(row["job_id"]): str(row["name"]) for row in submitted}
    for row in read_attempts(run_dir):
        if row["job_id"] != "none":
            names.setdefault(str(row["job_id"]), "train")
    return names


def read_attempts(run_dir: Path) -> list[JobRow]:
    """Rows of attempts.jsonl; empty if there is none. Skips damaged rows."""
    rows = read_rows(run_dir / "logs" / ATTEMPTS_FILE, _BEGUN)
    return [row for row in rows if "end" not in row or has_fields(row, _ENDED)]


def _append(run_dir: Path, row: JobRow, name: str) -> None:
    """Appends a row to a file of `logs`."""
    line = json.dumps(row).encode() + b"\n"
    with (run_dir / "logs" / name).open("a+b") as file:
        # Starts a new line, because a lost node may leave a partial one.
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def main(arguments: Sequence[str]) -> int:
    """Runs one command of a batch script; returns the exit code.

    `describe`, `begin` and `urls` print for the shell.
    """
    return run_command(lambda: _run_verb(*arguments))


def _run_verb(verb: str, *words: str) -> int:
    code = int(ExitCode.OK)
    again = False
    path = Path(words[0])
    try:
        match verb:
            case "describe":
                variables = describe(path, words[1:])
                text = "\n".join(f"{name}={shlex.quote(variables[name])}" for name in variables)
            case "begin":
                text = str(begin(path, os.environ.get("SLURM_JOB_ID", "none")))
            case "urls":
                text = ",".join(wait_for_urls(path, int(words[2]), float(words[1])))
            case _:
                code, again, reason = end(path, int(words[1]), int(words[2]))
                text = f"exit code {code}: {'requeue' if again else 'stop'}: {reason}"
    except OSError as error:
        # ConfigError has the exit code of a wrong configuration: the job is not requeued.
        fix = "correct run.dir or its permissions, or free some space"
        raise ConfigError(f"{error.filename}: {error.strerror}; {fix}") from None

    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    if again:
        requeue(os.environ["SLURM_JOB_ID"])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
