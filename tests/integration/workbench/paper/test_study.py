"""`paper` with its real commands: two methods, one seed, few steps; killed in the middle, resumed,
the same tables.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.cli import main
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.workbench.paper import study as paper
from tests.support.tiny_run import REWARD

REPO = Path(__file__).resolve().parents[4]
WARMSTART = ("run.steps=3", "optimizer.warmup_updates=1", "checkpoint.every=null")
RUN = (
    "run.steps=3",
    "optimizer.warmup_updates=1",
    "evaluation.every=null",
    "batch.prompts_per_step=4",
)
RUN += ("evaluation.benchmarks.0.limit=4", "checkpoint.every=1", "admission.truncated=judge")
CALL = "import sys; from tests.integration.workbench.paper.test_study import call; sys.exit(call(*sys.argv[1:]))"


def call(configs: str, folder: str, *more: str) -> int:
    """`pacs-megatron paper` with the study of `configs`, in this process."""
    paper.shipped_folder = lambda name: Path(configs)
    names = ("table2", "table3", "figure5")
    # An untrained model has no right answers: labels are a function of the text.
    reward = (
        f"reward={{name: custom, workers: 1, function: '{Path(configs).parent}/reward.py:reward'}}"
    )
    return main(
        ["paper", *names, "--scale", "laptop", "--dir", folder, "--seeds", "1", *more, *RUN, reward]
    )


def short_study(folder: Path) -> Path:
    """A checkout whose warm start takes three steps, and whose study has no PPO."""
    shutil.copytree(REPO / "configs", folder / "configs")
    (folder / "examples").symlink_to(REPO / "examples")
    (folder / "reward.py").write_text(REWARD.format(delay_s=0))
    path = folder / "configs" / "paper" / "studies" / "laptop.yaml"
    spec: dict[str, Any] = read_yaml(path, "study").plain()  # type: ignore[assignment]
    spec["prepare"]["warmstart"]["python"] += WARMSTART
    for entry in spec["artefacts"].values():
        entry["methods"] = [method for method in entry["methods"] if method != "ppo"]
    path.write_text(json.dumps(spec))
    return folder / "configs"


def start(
    configs: Path, folder: Path, *more: str, env: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    environment = {**env, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CALL, str(configs), str(folder), *more],
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(configs: Path, folder: Path) -> str:
    out, err = start(configs, folder).communicate(timeout=1800)
    assert "\ntable2" in out, err[-3000:]
    return out


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_and_resumed_gives_the_same_tables(tmp_path: Path) -> None:
    configs = short_study(tmp_path)
    one = tmp_path / "one"
    other = tmp_path / "other"
    whole = finish(configs, one)
    assert "tiny-grpo-s0: train" in whole and "tiny-pacs-s0: diversity" in whole
    cells = json.loads((one / "table2.json").read_text())
    assert all(0 < cell["ours"][0] < 100 for cell in cells if cell["metric"] == "pass@1")
    assert len({tuple(cell["ours"]) for cell in cells}) > 3
    again = finish(configs, one)
    assert again == whole[whole.index("\ntable2") :]  # nothing runs
    for name in ("inputs", "warmstart"):  # as if made there: the folders are the same for both
        shutil.copytree(one / name, other / name)
    process = start(configs, other)
    metrics = other / "tiny-grpo-s0" / "metrics.jsonl"
    deadline = time.monotonic() + 1800
    while process.poll() is None and not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None and metrics.exists()
    process.send_signal(signal.SIGKILL)  # of `paper`: its run receives SIGTERM, saves and stops
    process.communicate(timeout=600)
    while time.monotonic() < deadline:
        out, err = start(configs, other).communicate(timeout=1800)
        if "is in use by" not in err:  # the run has stopped
            break
        time.sleep(1)
    assert "\ntable2" in out, err[-3000:]
    resumed = out[out.index("\ntable2") :].replace(str(other), str(one))
    assert resumed == again
    for name in ("table2", "table3", "figure5"):
        assert (one / f"{name}.json").read_bytes() == (other / f"{name}.json").read_bytes()
