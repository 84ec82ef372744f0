"""`paper` as jobs of a real Slurm: the tables of the same study on this host."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import ROOT, job_environment
from tests.support.slurm import Slurm
from tests.support.studies import finish, short_study, start


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_the_jobs_of_a_study_give_the_tables_of_this_host(
    nemo_run: None, slurm: Slurm, tmp_path: Path
) -> None:
    configs = short_study(tmp_path)
    here = tmp_path / "here"
    there = tmp_path / "there"
    finish(configs, here)
    for name in ("inputs", "warmstart"):
        shutil.copytree(here / name, there / name)
    cluster = tmp_path / "cluster.yaml"
    text = (ROOT / "configs" / "clusters" / "local.yaml").read_text()
    cluster.write_text(f"{text}partition: debug\naccount: none\npython: [{sys.executable}]\n")
    env = slurm.env | job_environment(ROOT) | {"NEMORUN_HOME": str(tmp_path / "nemo")}

    def command() -> str:
        out, err = start(configs, there, "--cluster", str(cluster), env=env).communicate(
            timeout=1800
        )
        assert out, err[-3000:]
        return out

    first = command()
    runs = ("tiny-base", "tiny-grpo-s0", "tiny-pacs-s0")
    assert all(f"{run}: submitted" in first for run in runs) and "\ntable2" not in first
    again = command()
    assert all(f"{run}: in the queue" in again or f"{run}: submitted" not in again for run in runs)
    deadline = time.monotonic() + 1800
    while slurm.run("squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(1)
    tables = command()
    assert "\ntable2" in tables and "submitted" not in tables, tables
    for name in ("table2", "table3", "figure5"):
        ours, expected = (
            json.loads((folder / f"{name}.json").read_text()) for folder in (there, here)
        )
        assert ours == expected
