"""The other scripts of slurm/ as jobs: conversion, and the self-test with its certificates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import job_environment
from tests.support.slurm import Slurm
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = pytest.mark.slurm


@pytest.mark.full
def test_conversion_as_a_job(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    out = tmp_path / "job.log"
    words = ["convert", "to-megatron", "--hf", str(model), "--verify"]
    words += ["--out", str(tmp_path / "converted")]
    script = str(repo / "slurm" / "command.sbatch")
    options = ["--cpus-per-task=1", f"--output={out}"]
    job_id = slurm.submit(*options, script, *words, cwd=tmp_path, env=job_environment(repo))
    assert slurm.wait(job_id)["JobState"] == "COMPLETED", out.read_text()
    assert "equal bit for bit" in out.read_text()
    assert (tmp_path / "converted").is_dir()


@pytest.mark.campaign
def test_the_selftest_on_cpu(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "job.log"
    folder = tmp_path / "selftest"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={out}"]
    script = str(repo / "slurm" / "selftest.sbatch")
    job_id = slurm.submit(*options, script, str(folder), cwd=tmp_path, env=job_environment(repo))
    assert slurm.wait(job_id, 850)["JobState"] == "COMPLETED", out.read_text()
    green = {
        path.parent.name
        for path in folder.glob("*/certificate.json")
        if json.loads(path.read_text())["result"] == "green"
    }
    assert green == {
        "dp2",
        "dp2-distributed-optimizer",
        "tp2",
        "tp2-sequence-parallel",
        "pp2",
        "cp2",
    }
    assert "tp2-pp2: not run, requires 4 ranks, the job has 2" in out.read_text()
