"""`sbatch slurm/train.sbatch` on a real Slurm: two nodes, a signal, a requeue, and the same bits as
without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pacs_megatron.runtime.cores import DRIVER_PART, allowed_cores, divide, split
from tests.integration.slurm.conftest import job_environment, read_attempts, running, wait_for_rows
from tests.support.needs import require_sglang
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.slurm]
STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same run on this host, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_tiny_run(folder, make_tiny_qwen3(folder / "model"))
    command = [
        sys.executable,
        "-m",
        "pacs_megatron",
        "train",
        str(config),
        f"run.steps={STEPS}",
        "checkpoint.every=3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run_dir = folder / "runs" / "tiny"
    assert all(
        row["optimizer/grad_norm"] > 0 for row in metrics(run_dir)
    )  # otherwise equal weights would prove nothing
    return run_dir


def submit(slurm: Slurm, repo: Path, config: Path, *overrides: str, launcher: str = "srun") -> str:
    env = job_environment(repo) | {"PACS_LAUNCHER": launcher}
    script = str(repo / "slurm" / "train.sbatch")
    resources = ["resources.nodes=2", "run.nproc=1", f"run.steps={STEPS}", "checkpoint.every=3"]
    out = f"--output={config.parent}/job.log"
    return slurm.submit(
        "--nodes=2", out, script, str(config), *resources, *overrides, cwd=config.parent, env=env
    )


def metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_s"}
        for row in rows
    ]


def job_text(config: Path) -> str:
    run_dir = config.parent / "runs" / "tiny"
    logs = "".join(path.read_text() for path in sorted(run_dir.glob("logs/attempt_*/output.log")))
    return (config.parent / "job.log").read_text() + logs


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.full)])
def test_signal_requeue_resume_gives_the_same_bits(
    slurm: Slurm, repo: Path, tmp_path: Path, undisturbed: Path, launcher: str
) -> None:
    config = write_tiny_run(tmp_path, undisturbed.parents[1] / "model", delay_s=0.05)
    job_id = submit(slurm, repo, config, launcher=launcher)
    run_dir = tmp_path / "runs" / "tiny"
    wait_for_rows(run_dir, 2)
    slurm.run(
        "scancel", "--signal=USR1", "--batch", job_id
    )  # what --signal=B:USR1@300 does before the time limit
    fields = slurm.wait(job_id)
    text = job_text(config)
    assert fields["JobState"] == "COMPLETED", text
    assert int(fields["Restarts"]) == 1
    attempts = read_attempts(run_dir)
    assert [row["code"] for row in attempts] == [75, 0], text
    assert 2 <= attempts[0]["end_step"] < STEPS
    assert attempts[1]["begin_step"] == attempts[0]["end_step"]
    assert os.readlink(run_dir / "logs" / "latest") == "attempt_2"
    assert metrics(run_dir) == metrics(undisturbed)
    assert (run_dir / "hf" / "model.safetensors").read_bytes() == (
        undisturbed / "hf" / "model.safetensors"
    ).read_bytes()


@pytest.mark.full
def test_a_wrong_configuration_ends_with_its_code_and_is_not_requeued(
    slurm: Slurm, repo: Path, tmp_path: Path
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    job_id = submit(slurm, repo, config, f"data.train.path={tmp_path}/nothere.jsonl")
    fields = slurm.wait(job_id)
    text = job_text(config)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0"), text
    assert fields["Restarts"] == "0"
    assert "DataError: " in text
    assert "nothere.jsonl" in text
    assert "Traceback" not in text


def test_wrong_number_of_nodes_is_rejected_at_once(
    slurm: Slurm, repo: Path, tmp_path: Path
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    job_id = submit(slurm, repo, config, "resources.nodes=1", "run.nproc=2")
    assert slurm.wait(job_id)["ExitCode"] == "2:0"
    assert "needs 1 + 0 nodes, the job has 2; pass --nodes" in (tmp_path / "job.log").read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_ranks_and_driver_have_cores_of_their_own(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    """The tasks start with all cores of the node; without GPUs the ranks divide them evenly."""
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    words = [str(repo / "slurm" / "train.sbatch"), str(config), "run.nproc=2", "run.steps=50"]
    out = f"--output={tmp_path}/job.log"
    job_id = slurm.submit("--nodes=1", out, *words, cwd=tmp_path, env=job_environment(repo))
    wait_for_rows(tmp_path / "runs" / "tiny", 1)
    ranks: dict[int, set[int]] = {}
    drivers: list[set[int]] = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        if {"pacs_megatron.training.main", str(config)} <= set(command):
            local_rank = int(process.environ()["LOCAL_RANK"])
            ranks[local_rank] = os.sched_getaffinity(process.pid)
        if "pacs_megatron.rollout.driver" in command and str(tmp_path) in " ".join(command):
            drivers.append(os.sched_getaffinity(process.pid))
            drivers += [os.sched_getaffinity(worker.pid) for worker in process.children(True)]
    slurm.run("scancel", job_id)
    slurm.wait(job_id)

    parts = [split(share, DRIVER_PART) for share in divide(allowed_cores(), [None, None])]
    assert ranks == {rank: own for rank, (own, _) in enumerate(parts)}
    assert len(drivers) > 1 and all(cores == parts[0][1] | parts[1][1] for cores in drivers)


@pytest.mark.full
def test_cancel_leaves_no_process(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    job_id = submit(slurm, repo, config)
    wait_for_rows(tmp_path / "runs" / "tiny", 1)
    slurm.run("scancel", job_id)
    assert slurm.wait(job_id)["JobState"] == "CANCELLED"
    deadline = time.monotonic() + 600
    while (left := running(str(config))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.full
@pytest.mark.sglang
def test_a_rollout_node_with_a_real_sglang_server(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    interpreter = require_sglang()
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    letters = "[a, e, i, o, u, s, t, n, r, l, d, c, p, m]"
    servers = (
        f"{{python: [{interpreter}], device: cpu, max_total_tokens: 4096, start_timeout_s: 400}}"
    )
    job_id = submit(
        slurm,
        repo,
        config,
        *("resources.nodes=1", "resources.rollout_nodes=1", "run.nproc=2", "run.steps=2"),
        *(
            "rollout=null",
            "rollout.engine=sglang",
            "rollout.dtype=fp32",
            "rollout.sync.transport=broadcast",
        ),
        f"rollout.sampling={{max_response_tokens: 12, stop: {letters}}}",
        f"rollout.servers={servers}",
    )
    fields = slurm.wait(job_id)
    text = job_text(config)
    run_dir = tmp_path / "runs" / "tiny"
    text += "".join(path.read_text() for path in run_dir.glob("logs/attempt_*/servers.log"))
    assert fields["JobState"] == "COMPLETED", text
    assert [row["step"] for row in metrics(run_dir)] == [1, 2]
    assert not running(str(tmp_path))  # neither ranks nor sglang's own children
