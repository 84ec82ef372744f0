"""The tutorial of docs/agents.md: a tiny model learns to call a calculator, and its control does
not.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.observability.metrics import read_metrics
from tests.support.tiers import in_tiers

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "agents.md"


def call(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def commands() -> list[list[str]]:
    """The commands of the tutorial."""
    text = PAGE.read_text().partition("## Tutorial")[2].partition("\n## ")[0]
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        found += [shlex.split(line) for line in block.splitlines()]
    return found


def curve(folder: Path, name: str) -> list[float]:
    """A metric of each row that has it."""
    return [float(row[name] or 0.0) for row in read_metrics(folder) if name in row]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", in_tiers(("0", "1", "2")))
def test_the_tutorial_learns_and_its_control_does_not(tmp_path: Path, seed: str) -> None:
    """Every command of the page, in another folder."""
    learn, control, evaluate = commands()
    assert learn[:2] == control[:2] == ["python", "-m"] and evaluate[0] == "pacs-megatron"
    options = (f"--dir={tmp_path}", f"--seed={seed}")
    print(call(*learn[2:], *options))
    print(call(*control[2:], *options))

    use = curve(tmp_path / "tools", "agent/tool_use_frac")
    passed = curve(tmp_path / "tools", "eval/test/pass@1")
    assert sum(use[:3]) / 3 < 0.35 and sum(use[-3:]) / 3 > 0.8
    assert passed[0] < 0.3 and passed[-1] > passed[0] + 0.3
    of_control = curve(tmp_path / "tools-control", "agent/tool_use_frac")
    assert sum(of_control[-3:]) / 3 < 0.5
    assert curve(tmp_path / "tools-control", "eval/test/pass@1")[-1] < passed[-1] - 0.3

    words = [word.replace("runs/", f"{tmp_path}/") for word in evaluate[1:]]
    benchmark = f"evaluation.benchmarks.0.path={tmp_path}/tools-inputs/data/test.json"
    out = call("pacs_megatron", *words, f"--out={tmp_path}/eval", benchmark)
    print(out)
    assert "pass@1" in out
