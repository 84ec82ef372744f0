"""Every command of docs/operations.md runs, or is marked as needing what no test machine has."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pacs_megatron.cli import main
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[2]
MARKS = ("# GPU", "# network", "# cluster")


def commands() -> list[str]:
    """The documented commands that have to work here."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line]
    assert len(lines) > 20
    return [line for line in lines if not line.rstrip().endswith(MARKS)]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder `runs/NAME` as the document calls it, with a checkpoint and an open attempt."""
    folder = tmp_path_factory.mktemp("operations")
    config = write_tiny_run(folder, make_tiny_qwen3(folder / "model"))
    command = [sys.executable, "-m", "pacs_megatron", "train", str(config), "run.name=NAME", "run.steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "NAME"


def test_nothing_but_known_programs() -> None:
    programs = {shlex.split(command)[0] for command in commands()}
    assert programs == {"pacs-megatron", "source"}


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("pacs-megatron")])
def test_command(
    command: str,
    finished_run: Path,
    require: Callable[[bool, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "submit":
        require(importlib.util.find_spec("nemo_run") is not None, "nemo-run==0.11.1 with leptonai==0.27.0")
        monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "nemo"))
        monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(ROOT)
    assert main([word.replace("runs/NAME", str(finished_run)) if word == "runs/NAME" else word for word in words]) == 0
    assert capsys.readouterr().out
