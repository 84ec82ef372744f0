"""`submit` by the real NeMo-Run: every shipped configuration as a dry run, and jobs on a real Slurm."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.submit import Request, expand, submit
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "configs" / "clusters"
RUNS = [path for path in sorted((ROOT / "configs" / "runs").glob("*.yaml")) if "gpus_per_node" in path.read_text()]


@pytest.fixture
def nemo_run(require: Callable[[bool, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(importlib.util.find_spec("nemo_run") is not None, "nemo-run==0.11.1 with leptonai==0.27.0")
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "nemo"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # its tunnel reads it, which pytest's own refuses


def make_request(config: Path, cluster: str = "local", **changes: object) -> Request:
    options = {"config": config, "overrides": (), "cluster": load_cluster(CLUSTERS / f"{cluster}.yaml")}
    return Request(**(options | changes))  # type: ignore[arg-type]


@pytest.mark.timeout(300)
def test_every_shipped_config_dry_runs(nemo_run: None, tmp_path: Path) -> None:
    for index, path in enumerate(RUNS):
        cluster = ("example-bare", "example-pyxis", "example-apptainer")[index % 3]
        texts = list(submit(make_request(path, cluster, overrides=(f"run.dir={tmp_path}",)), dry_run=True))
        together = "\n".join(texts)
        assert f"name: {path.stem}" in texts[0]
        assert "--signal=USR1@900" in together
        assert "#SBATCH --requeue" in together
        assert "launch.job begin" in together
        assert "launch.job end --requeue" in together
        assert ("#SBATCH hetjob" in together) == ("rollout_nodes" in path.read_text())
        assert ("--container-image" in together) == (cluster == "example-pyxis")
        assert ("apptainer exec --nv" in together) == (cluster == "example-apptainer")
    assert not (tmp_path / RUNS[0].stem).exists()  # a dry run leaves no run folder


@pytest.mark.timeout(120)
def test_dry_run_is_quick(nemo_run: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pacs_megatron", "submit", str(RUNS[0]), f"run.dir={tmp_path}", "--dry-run"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*command, "--cluster", str(CLUSTERS / "example-bare.yaml")], check=True, capture_output=True, cwd=ROOT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds, so that other work on this machine does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15


def test_a_sweep_is_every_combination(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    jobs = expand(make_request(config, sweep=("objective.beta=0.5,1,2",), seeds=2))
    assert [job.name for job in jobs][:3] == ["tiny-beta0.5-seed5", "tiny-beta0.5-seed6", "tiny-beta1-seed5"]
    assert [(job.loaded.config.run.seed, job.loaded.config.run.name) for job in jobs][-1] == (6, "tiny-beta2-seed6")
    assert len({job.loaded.config.run.name for job in jobs}) == 6
    with pytest.raises(ConfigError, match="expected key=a,b,c"):
        expand(make_request(config, sweep=("objective.beta",)))
    with pytest.raises(ConfigError, match=r"did you mean `objective\.beta`"):
        expand(make_request(config, sweep=("objective.bet=1,2",)))


def test_without_nemo_run_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"pip install nemo-run==0\.11\.1 leptonai==0\.27\.0, or: sbatch"):
        list(submit(make_request(config), dry_run=True))


def submit_for_real(slurm: Slurm, config: Path, *arguments: str) -> str:
    env = slurm.env | {
        "NEMORUN_HOME": str(config.parent / "nemo"),
        "PACS_MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    cluster = config.parent / "cluster.yaml"
    text = (CLUSTERS / "local.yaml").read_text()
    cluster.write_text(f"{text}partition: debug\naccount: none\npython: [{sys.executable}]\n")
    command = [sys.executable, "-m", "pacs_megatron", "submit", str(config), *arguments, "--cluster", str(cluster)]
    done = subprocess.run(command, env=env, cwd=config.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_job(slurm: Slurm) -> int:
    ids = [line.split("=")[1].split()[0] for line in slurm.run("scontrol", "--oneliner", "show", "job").splitlines()]
    return max(int(job_id) for job_id in ids if job_id.isdecimal())


@pytest.mark.slurm
@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_nodes_signal_requeue_and_evaluation(nemo_run: None, slurm: Slurm, tmp_path: Path) -> None:
    from tests.integration.slurm.test_train import wait_for_rows

    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"), delay_s=0.05)
    two_nodes = ["resources.nodes=2", "run.nproc=1", "run.steps=6", "checkpoint.every=3"]
    benchmark = f"evaluation.benchmarks=[{{path: {tmp_path}/train.jsonl, name: sums, columns: {{problem: problem, answer: answer}}}}]"
    sampling = "evaluation.sampling={max_response_tokens: 8}"
    out = submit_for_real(slurm, config, *two_nodes, benchmark, sampling, "--evaluate")
    assert "submitted" in out
    run_dir = tmp_path / "runs" / "tiny"
    wait_for_rows(run_dir, 2, 150)
    train = next(json.loads(line)["job_id"] for line in (run_dir / "logs" / "attempts.jsonl").read_text().splitlines())
    slurm.run("scancel", "--signal=USR1", train)  # to the tasks, as --signal=USR1@300 does
    fields = slurm.wait(train, 200)
    logs = "\n".join(path.read_text() for path in (tmp_path / "nemo").rglob("*.out"))
    assert fields["JobState"] == "COMPLETED", logs
    attempts = [json.loads(line) for line in (run_dir / "logs" / "attempts.jsonl").read_text().splitlines()]
    assert [row["code"] for row in attempts] == [75, 0], logs
    assert slurm.wait(str(last_job(slurm)), 120)["JobState"] == "COMPLETED"
    assert json.loads((run_dir / "eval" / "results.json").read_text())["metrics"]
    assert os.readlink(run_dir / "logs" / "latest") == "attempt_2"


@pytest.mark.slurm
@pytest.mark.sglang
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_heterogeneous_job_with_a_real_sglang_server(
    nemo_run: None, slurm: Slurm, tmp_path: Path, require: Callable[[bool, str], None]
) -> None:
    interpreter = ROOT / ".venv-sglang" / "bin" / "python"
    require(interpreter.exists(), "make install-sglang")
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    servers = f"{{python: [{interpreter}], device: cpu, max_total_tokens: 4096, start_timeout_s: 400}}"
    overrides = [
        *("resources.rollout_nodes=1", "run.nproc=2", "run.steps=2"),
        *("rollout=null", "rollout.engine=sglang", "rollout.dtype=fp32", "rollout.sync.way=broadcast"),
        "rollout.sampling={max_response_tokens: 12, stop: [a, e, i, o, u, s, t, n, r, l]}",
        f"rollout.servers={servers}",
    ]
    submit_for_real(slurm, config, *overrides)
    job_id = str(min(range(last_job(slurm) - 1, last_job(slurm) + 1)))
    fields = slurm.wait(job_id, 500)
    logs = "\n".join(path.read_text() for path in (tmp_path / "nemo").rglob("*.out"))
    assert fields["JobState"] == "COMPLETED", logs
    assert [json.loads(line)["step"] for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").open()] == [1, 2]
    attempts = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "logs" / "attempts.jsonl").open()]
    assert [row["code"] for row in attempts] == [0]
