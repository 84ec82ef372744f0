"""The scripts of slurm/ and tools/ by themselves: short, clean for shellcheck, and usage at their top."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BATCH = sorted((ROOT / "slurm").glob("*.sbatch"))
SCRIPTS = [*BATCH, *sorted((ROOT / "tools").glob("*.sh"))]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def test_the_scripts_are_there() -> None:
    assert [path.stem for path in BATCH] == ["convert", "eval", "preflight", "selftest", "train"]
    listed = (ROOT / "slurm" / "README.md").read_text()
    assert all(f"`{path.name}" in listed for path in BATCH)


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_batch_scripts_are_short_and_say_how_they_are_called(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 100
    assert max(len(line) for line in lines) <= 140
    assert "set -euo pipefail" in lines
    assert any(line.startswith("#   sbatch ") for line in lines[:20])
    # Without arguments: its usage and a code that says so, not a half-started job.
    done = subprocess.run(
        ["bash", str(path)], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode != 0
    assert "usage: sbatch" in done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    assert SHELLCHECK.exists(), "make install-dev"
    done = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
