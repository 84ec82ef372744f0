"""The fixture itself: two nodes, a job on both, and where srun's tasks find their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.slurm import Slurm

pytestmark = pytest.mark.slurm


def test_tasks_of_srun_become_ranks(slurm: Slurm, repo: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "python=$1; cd $2\n"
        "probe='import json, os; from dataclasses import asdict; from "
        "pacs_megatron.runtime.environment import find_rank;"
        " place = find_rank(os.environ); print(json.dumps(place and asdict(place)))'\n"
        '$python -c "$probe"\n'
        'srun --ntasks=4 --ntasks-per-node=2 $python -c "$probe"\n'
    )
    import sys

    out = tmp_path / "out"
    job_id = slurm.submit(
        "--nodes=2",
        "--ntasks-per-node=2",
        f"--output={out}",
        str(script),
        sys.executable,
        str(repo),
        cwd=tmp_path,
    )
    assert slurm.wait(job_id)["JobState"] == "COMPLETED"
    batch, *tasks = [json.loads(line) for line in out.read_text().splitlines()]
    assert batch is None  # the batch script has SLURM_PROCID too, but is no rank
    assert sorted(task["rank"] for task in tasks) == [0, 1, 2, 3]
    assert {
        (task["world_size"], task["local_world_size"], task["master_addr"]) for task in tasks
    } == {(4, 2, "n1")}
    assert sorted(task["local_rank"] for task in tasks) == [0, 0, 1, 1]
    assert len({task["master_port"] for task in tasks}) == 1
