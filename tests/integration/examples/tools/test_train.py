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

from examples.quickstart.run import make_inputs
from examples.tools.problems import write_products
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.support.needs import require_sglang
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


@pytest.mark.full
@pytest.mark.sglang
def test_two_steps_on_the_real_server(tmp_path: Path) -> None:
    """After the whole warm start, which teaches calls."""
    require_sglang()
    make_inputs(tmp_path / "tools-inputs", 0, write_products)
    call(
        "pacs_megatron",
        "train",
        "examples/tools/warmstart.yaml",
        f"run.dir={tmp_path}",
        "run.seed=0",
        f"model.path={tmp_path}/tools-inputs/model",
        f"data.train.path={tmp_path}/tools-inputs/data/demonstrations.json",
    )
    call(
        "pacs_megatron",
        "train",
        "examples/tools/train-sglang.yaml",
        f"run.dir={tmp_path}",
        f"model.path={tmp_path}/tools-warmstart/hf",
        f"data.train.path={tmp_path}/tools-inputs/data/train.json",
        f"evaluation.benchmarks.0.path={tmp_path}/tools-inputs/data/test.json",
        "evaluation.benchmarks.0.limit=4",
        "run.steps=2",
        "batch.prompts_per_step=8",
        "optimizer.warmup_updates=1",
        f"rollout.servers.python=[{ROOT}/.venv-sglang/bin/python]",
    )
    run_dir = tmp_path / "tools-sglang"
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["agent/failed"] == 0 and row["tool/calculator/calls"] > 0
        assert row["reward/label_mean"] > 0 and row["agent/cached_frac"] > 0
    versions = set()
    for step in (1, 2):
        for sample in read_rollouts(rollout_path(run_dir, step)):
            versions |= {span["version"] for span in sample["spans"]}
    # A version counts updates, of which a step has two.
    assert versions == {0, 2}
