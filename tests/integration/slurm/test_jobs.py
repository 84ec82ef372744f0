"""The other scripts of slurm/ as jobs: conversion, and the self-test with its certificate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import job_environment
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = pytest.mark.slurm


def test_conversion_as_a_job(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    model, out = make_tiny_qwen3(tmp_path / "model"), tmp_path / "job.log"
    words = ["to-megatron", "--hf", str(model), "--out", str(tmp_path / "converted"), "--verify"]
    script = str(repo / "slurm" / "convert.sbatch")
    options = ["--cpus-per-task=1", f"--output={out}"]
    job_id = slurm.submit(*options, script, *words, cwd=tmp_path, env=job_environment(repo))
    assert slurm.wait(job_id)["JobState"] == "COMPLETED", out.read_text()
    assert "equal bit for bit" in out.read_text()
    assert (tmp_path / "converted").is_dir()


@pytest.mark.full
@pytest.mark.sglang
def test_the_selftest_on_cpu(slurm: Slurm, repo: Path, tmp_path: Path, require: Callable[[bool, str], None]) -> None:
    interpreter = repo / ".venv-sglang" / "bin" / "python"
    require(interpreter.exists(), "make install-sglang")
    out, folder = tmp_path / "job.log", tmp_path / "selftest"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={out}"]
    script = str(repo / "slurm" / "selftest.sbatch")
    arguments = [script, str(folder), "--sglang-python", str(interpreter)]
    job_id = slurm.submit(*options, *arguments, cwd=tmp_path, env=job_environment(repo))
    assert slurm.wait(job_id, 1100)["JobState"] == "COMPLETED", out.read_text()
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["passed"]
    results = {part["name"]: part["result"] for part in certificate["parts"]}
    assert {name for name, result in results.items() if result == "ok"} >= {"one rank", "layout tp2", "layout pp2"}
    assert results["save and resume"] == "ok"
    assert results["network"] == "ok"
    assert [results[f"weight sync {transport}"] for transport in ("disk", "broadcast", "ipc")] == ["ok"] * 3
    assert results["fp8 delayed"] == "not run"
