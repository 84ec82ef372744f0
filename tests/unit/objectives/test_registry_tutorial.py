"""The tutorial of docs/objective.md: its one file is all that a new objective needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_the_file_of_the_tutorial_trains_two_steps(tiny_qwen3: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    [name] = re.findall(r'name: Literal\["(\w+)"\]', code)
    shutil.copytree(
        ROOT / "pacs_megatron",
        tmp_path / "pacs_megatron",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "pacs_megatron" / "objectives" / f"{name}.py").write_text(code)
    config = write_tiny_run(tmp_path, tiny_qwen3)
    chosen = (
        str(config),
        f"objective.name={name}",
        "objective.power=0.5",
        "parallel.tp=1",
        "run.nproc=1",
    )

    def run(*command: str, expected: int = 0) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pacs_megatron", *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == expected, done.stderr[-3000:]
        return done.stdout if expected == 0 else done.stderr

    assert "objective.power = 0.5" in run("config", "show", *chosen)
    assert "Exponent of the rarity" in run("config", "schema")
    assert "a checkpoint:" in run("plan", *chosen)
    line = run("certify", *chosen, expected=2).splitlines()[
        -1
    ]  # a busy host has lines of waits before it
    assert line.startswith(
        f"ConfigError: certify has no reference for objective.name={name}; add its formula"
    )
    run("train", *chosen)
    rows = [
        json.loads(row)
        for row in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if "objective/loss" in row]
    assert len(trained) == 2
    assert all(row["optimizer/grad_norm"] > 0 and row["objective/loss"] > 0 for row in trained)


def test_two_files_of_one_name_are_rejected() -> None:
    from pacs_megatron.objectives.gspo import GspoOptions
    from pacs_megatron.objectives.shared.base import Objective

    with pytest.raises(ValueError, match=r"objective gspo of .* exists in .*\.gspo; rename one"):
        type("Copy", (Objective,), {}, options=GspoOptions)
