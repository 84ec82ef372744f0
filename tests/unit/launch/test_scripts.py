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


def called(path: Path, *words: str, **variables: str) -> str:
    """The one line of a script that was called wrongly."""
    environment = {"PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", path, *words], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_batch_script_that_is_called_wrongly_says_so(path: Path) -> None:
    """And starts nothing."""
    config = str(ROOT / "configs" / "runs" / "quickstart.yaml")
    assert called(path).startswith("usage: sbatch ")
    assert "runs inside a job; submit it" in called(path, config)
    assert "PACS_SITE=nothere: no such file" in called(path, config, SLURM_JOB_ID="1", PACS_SITE="nothere")
    if path.stem in ("eval", "preflight", "train"):
        assert called(path, "nothere.yaml", SLURM_JOB_ID="1").startswith("nothere.yaml: no such configuration;")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    assert SHELLCHECK.exists(), "make install-dev"
    done = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
