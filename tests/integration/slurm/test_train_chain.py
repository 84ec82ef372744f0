"""Conversion, training and evaluation as jobs that wait for each other: by NeMo-Run and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import (
    job_environment,
    read_attempts,
    submit_by_nemo_run,
    texts_of_jobs,
)
from tests.support.needs import require_sglang
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def with_benchmark(folder: Path) -> list[str]:
    columns = "columns: {problem: problem, answer: answer}"
    return [
        f"evaluation.benchmarks=[{{path: {folder}/train.jsonl, name: sums, {columns}}}]",
        "evaluation.sampling={max_response_tokens: 8}",
    ]


def metrics_of_evaluation(run_dir: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run_dir / "eval" / "results.json").read_text())["metrics"]
    return found


def test_convert_train_evaluate_by_nemo_run_and_again(
    nemo_run: None, slurm: Slurm, tmp_path: Path
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    run_dir = tmp_path / "runs" / "tiny"
    overrides = ["run.nproc=2", *with_benchmark(tmp_path)]
    jobs = submit_by_nemo_run(slurm, config, *overrides, "--convert", "--evaluate")
    assert list(jobs) == ["convert", "train", "eval"]
    assert slurm.wait(jobs["eval"])["JobState"] == "COMPLETED"
    ended = {name: slurm.job(job) for name, job in jobs.items()}
    assert [job["ExitCode"] for job in ended.values()] == ["0:0"] * 3
    # Times of ISO 8601 in order: each job waited for the one before.
    assert ended["train"]["StartTime"] >= ended["convert"]["EndTime"]
    assert ended["eval"]["StartTime"] >= ended["train"]["EndTime"]
    # The trainer read the converted weights, and the first step sees the model that was given.
    assert f"{run_dir}/converted" in (run_dir / "config.yaml").read_text()
    assert (run_dir / "converted" / "certificate.json").is_file()
    assert 0 <= metrics_of_evaluation(run_dir)["eval/sums/pass@1"] <= 1
    assert [row["code"] for row in read_attempts(run_dir)] == [0]

    # The same command again: the conversion exists, the run continues to the new last step.
    again = submit_by_nemo_run(slurm, config, *overrides, "run.steps=3", "--convert", "--evaluate")
    assert slurm.wait(again["eval"])["JobState"] == "COMPLETED"
    assert [(row["begin_step"], row["end_step"]) for row in read_attempts(run_dir)] == [
        (-1, 2),
        (2, 3),
    ]


def test_convert_train_evaluate_by_sbatch(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    run_dir = tmp_path / "runs" / "tiny"
    converted = tmp_path / "converted"
    overrides = [str(config), f"model.path={converted}", *with_benchmark(tmp_path)]
    env = job_environment(repo)

    def submit(name: str, *words: str, after: str = "", options: tuple[str, ...] = ()) -> str:
        waiting = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
        script = str(repo / "slurm" / f"{name}.sbatch")
        out = f"--output={tmp_path}/{name}.log"
        return slurm.submit(*waiting, *options, out, script, *words, cwd=tmp_path, env=env)

    words = ["convert", "to-megatron", "--hf", str(tmp_path / "model"), "--out", str(converted)]
    first = submit("command", *words, options=("--cpus-per-task=1",))
    second = submit("train", *overrides, "run.nproc=2", after=first, options=("--nodes=1",))
    third = submit("eval", *overrides, "--model", str(run_dir / "hf"), after=second)
    logs = [tmp_path / f"{name}.log" for name in ("command", "train", "eval")]
    ends = [slurm.wait(job)["JobState"] for job in (first, second, third)]
    assert ends == ["COMPLETED"] * 3, "".join(path.read_text() for path in logs if path.exists())
    assert (converted / "certificate.json").is_file()
    assert "eval/sums/pass@1" in metrics_of_evaluation(run_dir)
    # The evaluation uses the trained weights: the same evaluation on this host gives the same
    # result.
    from pacs_megatron.workbench.evaluation.command import run_eval

    run_eval(config, overrides[1:], model=[str(run_dir / "hf")], out=tmp_path / "by-hand")
    by_hand = json.loads((tmp_path / "by-hand" / "results.json").read_text())["metrics"]
    assert by_hand == metrics_of_evaluation(run_dir)


def test_a_failed_job_ends_the_chain_with_its_code(
    nemo_run: None, slurm: Slurm, tmp_path: Path
) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    (tmp_path / "reward.py").write_text(
        "def reward(prompt, response):\n    raise ValueError('broken verifier')\n"
    )
    run_dir = tmp_path / "runs" / "tiny"
    jobs = submit_by_nemo_run(
        slurm,
        config,
        "run.nproc=2",
        "resources.max_attempts=2",
        *with_benchmark(tmp_path),
        "--evaluate",
    )
    fields = slurm.wait(jobs["train"])
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "1:0", "1")
    rows = read_attempts(run_dir)
    assert [(row["code"], row["end_step"]) for row in rows] == [(1, -1), (1, -1)]
    assert slurm.wait(jobs["eval"])["JobState"] == "CANCELLED"  # not pending
    assert not (run_dir / "eval").exists()
    logs = texts_of_jobs(tmp_path)
    assert "broken verifier" in logs
    assert "2 attempts in a row without a new checkpoint (resources.max_attempts=2)" in logs


def test_preflight_as_a_job(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    script = str(repo / "slurm" / "preflight.sbatch")
    out = tmp_path / "preflight.log"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={out}"]
    job = slurm.submit(*options, script, str(config), cwd=tmp_path, env=job_environment(repo))
    fields = slurm.wait(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), out.read_text()
    assert "network: " in out.read_text()
    job = slurm.submit(
        *options, script, str(config), "parallel.tp=3", cwd=tmp_path, env=job_environment(repo)
    )
    assert slurm.wait(job)["ExitCode"] == "2:0", out.read_text()
    assert "parallel.tp=3" in out.read_text()
    assert "Traceback" not in out.read_text()


@pytest.mark.sglang
@pytest.mark.timeout(2400)
def test_an_evaluation_on_the_servers_of_two_nodes(
    slurm: Slurm, repo: Path, tmp_path: Path
) -> None:
    """slurm/eval.sbatch --nodes=2: one real server a node, one client; both servers end with it."""
    interpreter = require_sglang()
    model = make_tiny_qwen3(tmp_path / "model")
    servers = (
        f"{{python: [{interpreter}], device: cpu, max_total_tokens: 8192, count: 2, "
        f"start_timeout_s: 900}}"
    )
    words = [
        str(write_tiny_run(tmp_path, model)),
        *("parallel.tp=1", "rollout=null", "rollout.engine=sglang", "rollout.sync.transport=disk"),
        *("rollout.sampling={max_response_tokens: 8}", f"rollout.servers={servers}"),
        *with_benchmark(tmp_path),
        *("--model", str(model), "--out", str(tmp_path / "out"), "evaluation.samples_per_prompt=6"),
    ]
    script = str(repo / "slurm" / "eval.sbatch")
    log = tmp_path / "eval.log"
    job = slurm.submit(
        "--nodes=2", f"--output={log}", script, *words, cwd=tmp_path, env=job_environment(repo)
    )
    assert slurm.wait(job, 2000.0)["JobState"] == "COMPLETED", log.read_text()
    assert (
        "eval/sums/pass@1" in json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    )
    [folder] = tmp_path.glob("eval-servers-*")
    assert len(list(folder.glob("*.urls"))) == 2
    assert not list(folder.rglob("*.pid"))
