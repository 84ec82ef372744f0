"""Real jobs: lost nodes, time limits, several signals, `status` and `cancel`, no process left."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import psutil
import pytest

from pacs_megatron.runtime.environment import job_port
from tests.integration.slurm.conftest import (
    job_environment,
    read_attempts,
    run_command,
    running,
    submit_by_nemo_run,
    wait_for_rows,
)
from tests.support.messages import error_lines
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.slurm, pytest.mark.full]
TWO_NODES = ("resources.nodes=2", "run.nproc=1")


def sbatch(
    slurm: Slurm, repo: Path, config: Path, *overrides: str, options: tuple[str, ...] = ()
) -> str:
    """slurm/train.sbatch on both nodes; the job's id."""
    words = [str(repo / "slurm" / "train.sbatch"), str(config), *TWO_NODES, *overrides]
    out = f"--output={config.parent}/job.log"
    return slurm.submit(
        "--nodes=2", *options, out, *words, cwd=config.parent, env=job_environment(repo)
    )


def text_of(config: Path) -> str:
    logs = sorted((config.parent / "runs" / "tiny").glob("logs/attempt_*/output.log"))
    return "".join(path.read_text() for path in [config.parent / "job.log", *logs])


def steps(run_dir: Path) -> list[int]:
    return [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def ranks_of(config: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [
        p for p in found if {"pacs_megatron.training.main", config} <= set(p.info["cmdline"] or ())
    ]


def assert_nothing_runs(word: str, within_s: float = 600.0) -> None:
    deadline = time.monotonic() + within_s
    while (left := running(word)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def test_a_lost_node_requeues_the_job_and_it_goes_on(
    slurm: Slurm, repo: Path, tmp_path: Path
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    run_dir = tmp_path / "runs" / "tiny"
    job = sbatch(slurm, repo, config, "run.steps=6")
    wait_for_rows(run_dir, 2)
    # As at a power failure: the node's rank ends without a message, then Slurm notices.
    lost = [
        process for process in ranks_of(str(config)) if process.environ()["SLURMD_NODENAME"] == "n2"
    ]
    assert lost
    for process in lost:
        process.kill()
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    deadline = time.monotonic() + 600
    while slurm.job(job)["JobState"] == "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.2)
    # Fails if the node has already registered again.
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
    fields = slurm.wait(job)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), text_of(config)
    first, second = read_attempts(run_dir)
    assert first.get("code") != 0  # its script may or may not have written a code
    assert 1 <= second["begin_step"] < 6
    assert (second["code"], second["end_step"]) == (0, 6)
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert_nothing_runs(str(tmp_path))


def test_a_port_of_another_program_costs_one_attempt(
    slurm: Slurm, repo: Path, tmp_path: Path
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    job = sbatch(slurm, repo, config, options=("--hold",))
    with socket.create_server(("127.0.0.1", job_port(job))):
        slurm.run("scontrol", "release", job)
        fields = slurm.wait(job)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), text_of(config)
    assert [row["code"] for row in read_attempts(tmp_path / "runs" / "tiny")] == [1, 0]
    assert "ConnectError: the 2 ranks cannot connect" in text_of(
        config
    ) and "EADDRINUSE" in text_of(config)


@pytest.mark.campaign
def test_the_time_limit_is_survived(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    """Slurm's own signal, not ours:

    `--signal` may come up to a minute early, and limits are whole minutes.
    """
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.4)
    run_dir = tmp_path / "runs" / "tiny"
    limits = ("--time=3", "--signal=B:USR1@60")  # so between one and two minutes after the start
    job = sbatch(slurm, repo, config, "run.steps=16", options=limits)
    fields = slurm.wait(job)
    rows = read_attempts(run_dir)
    assert fields["JobState"] == "COMPLETED", text_of(config)
    assert len(rows) >= 2
    assert [row["code"] for row in rows] == [75] * (len(rows) - 1) + [0]
    assert all(row["end"] - row["begin"] < 180 for row in rows)
    assert "signal: requesting the run to save and stop" in (tmp_path / "job.log").read_text()
    assert steps(run_dir) == list(range(1, 17))


@pytest.mark.campaign
def test_more_signals_do_not_cut_the_save_short(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    run_dir = tmp_path / "runs" / "tiny"
    job = sbatch(slurm, repo, config, "run.steps=6")
    wait_for_rows(run_dir, 2)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.run("scancel", "--signal=TERM", job)  # to the ranks, as a preemption's grace time does
    slurm.run("scancel", "--signal=TERM", "--batch", job)
    slurm.run("scancel", "--signal=TERM", job)
    fields = slurm.wait(job)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), text_of(config)
    rows = read_attempts(run_dir)
    assert [row["code"] for row in rows] == [75, 0], text_of(config)
    assert rows[0]["end_step"] >= 2
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]


def test_status_logs_and_cancel_of_real_jobs(nemo_run: None, slurm: Slurm, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.3)
    run_dir = tmp_path / "runs" / "tiny"

    def command(*words: str) -> str:
        done = run_command(slurm, tmp_path, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(*words: str) -> str:
        done = run_command(slurm, tmp_path, *words)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(error_lines(done.stderr)) == 1, done.stderr
        return done.stderr

    # A job that waits for another is known before it begins, and cancelled without a trace.
    blocker = slurm.submit("--nodes=2", "--exclusive", "--wrap=sleep 600", cwd=tmp_path)
    columns = "columns: {problem: problem, answer: answer}"
    benchmark = f"evaluation.benchmarks=[{{path: {tmp_path}/train.jsonl, name: sums, {columns}}}]"
    waiting = submit_by_nemo_run(
        slurm,
        config,
        *TWO_NODES,
        benchmark,
        "evaluation.sampling={max_response_tokens: 8}",
        "--evaluate",
    )
    assert re.search(rf"job {waiting['train']} \(train\): PENDING", command("status", str(run_dir)))
    assert "has job" in refused(
        "submit", str(config), *TWO_NODES, "--cluster", str(tmp_path / "cluster.yaml")
    )
    assert "no job was running" in command("cancel", "--save", str(run_dir))
    assert {slurm.wait(job)["JobState"] for job in waiting.values()} == {"CANCELLED"}
    slurm.run("scancel", blocker)
    assert "nothing to cancel" in refused("cancel", str(run_dir))

    # A job that runs: who does what, its log, save and stop, and a second one that is ended at
    # once.
    job = submit_by_nemo_run(slurm, config, *TWO_NODES, "run.steps=50")["train"]
    wait_for_rows(run_dir, 1)
    said = command("status", str(run_dir))
    assert re.search(rf"attempt 1  job {job}: RUNNING \S+ n\[1-2\]", said)
    assert re.search(r"ranks +\S.*: \S.*, no progress for at most \d+ s", said)
    assert "metrics    step " in said
    assert command("logs", str(run_dir), "--lines", "3").strip()
    assert "requested" in command("cancel", "--save", str(run_dir))
    assert (slurm.wait(job)["ExitCode"], len(read_attempts(run_dir))) == ("75:0", 1)
    assert re.search(r"preempted after .* min, step -1 -> \d+", command("status", str(run_dir)))

    job = submit_by_nemo_run(slurm, config, *TWO_NODES, "run.steps=50")["train"]
    rows = len(steps(run_dir))
    wait_for_rows(run_dir, rows + 1)
    assert f"cancelled {job}" in command("cancel", str(run_dir))
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert_nothing_runs(str(tmp_path))

    nowhere = tmp_path / "nowhere"
    assert "give a run folder" in refused("status", str(nowhere))
    assert "give a run folder" in refused("logs", str(nowhere))
    assert "give a run folder" in refused("cancel", str(nowhere))


def test_what_sbatch_rejects_is_one_line(nemo_run: None, slurm: Slurm, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "name: x\ngpu_request: none\nexclusive: false\npartition: nosuch\naccount: none\n"
    )
    done = run_command(
        slurm, tmp_path, "submit", str(config), "run.nproc=2", "--cluster", str(cluster)
    )
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ConfigError: ")
    assert "invalid partition specified: nosuch" in line
    assert "Traceback" not in done.stderr
