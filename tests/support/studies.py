"""A short study of `paper`, and how a test starts and ends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacs_megatron.cli import main
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.workbench.paper import study as paper
from tests.support.tiny_run import REWARD

REPO = Path(__file__).resolve().parents[2]
WARMSTART = ("run.steps=3", "optimizer.warmup_updates=1", "checkpoint.every=null")
RUN = (
    "run.steps=3",
    "optimizer.warmup_updates=1",
    "evaluation.every=null",
    "batch.prompts_per_step=4",
    "evaluation.benchmarks.0.limit=4",
    "checkpoint.every=1",
    "admission.truncated=judge",
)
CALL = "import sys; from tests.support.studies import call; sys.exit(call(*sys.argv[1:]))"


def call(configs: str, folder: str, *more: str) -> int:
    """`pacs-megatron paper` with the study of `configs`, in this process."""
    paper.shipped_folder = lambda name: Path(configs)  # type: ignore[attr-defined]
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
