"""The measuring scripts run to their end on a CPU and print what they promise; the figures
themselves are not judged.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(script: str) -> Any:
    """The script as a module; nothing is measured."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "benchmarks" / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_objectives_time_has_every_score() -> None:
    from typing import get_args

    from pacs_megatron.objectives.pacs import PacsOptions

    objective = load("objective")
    names = get_args(PacsOptions.model_fields["score"].annotation)
    assert set(objective.SCORES) == set(names)
    assert [objective.options_of(score).score for score in objective.SCORES] == [*objective.SCORES]


def test_the_trainers_work_of_a_weight_sync_is_timed() -> None:
    import torch

    weights = {"a": torch.ones(300, 1000), "b": torch.ones(7)}
    assert 0 < load("weight_sync").packing_seconds(weights, bucket_mib=1, repeats=2) < 60


@pytest.mark.full
def test_the_gpu_measurement_runs_dry_on_a_cpu(tmp_path: Path) -> None:
    printed = run(
        "train_step.py",
        "--dry-run-cpu",
        "--cases",
        "bf16",
        "fp8-tensorwise",
        "--out",
        str(tmp_path),
    )
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result["rows"]
    assert list(rows) == ["fp32", "bf16", "fp8-tensorwise"]
    bf16 = rows["bf16"]
    assert bf16["check"]["score_floor"] == 0.0 and bf16["check"]["score_drift"] == 0.0
    assert (
        0 < bf16["check"]["logprob_diff_mean"] < 0.02 and bf16["check"]["grad_norm_rel_diff"] < 0.05
    )
    assert bf16["speed"]["tokens_per_s"] > 0 and len(bf16["speed"]["step_s"]) == 2
    assert result["head"]["max_diff"] < 1e-3
    assert "needs a CUDA GPU, but none was found" in rows["fp8-tensorwise"]["check"]["refused"]
    assert (tmp_path / "table.txt").read_text().strip() in printed
    assert (tmp_path / "raw.log").stat().st_size > 0


@pytest.mark.full
def test_laptop_prints_the_ratio_to_a_plain_loop() -> None:
    printed = run("laptop.py", "--steps", "2")
    for line in ("with generation", "without generation", "CPU, with generation"):
        found = re.search(rf"^{line} +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
        assert found is not None, printed
        mine, theirs, ratio = (float(text) for text in found.groups())
        assert mine > 0 and theirs > 0 and abs(ratio - mine / theirs) < 0.02


@pytest.mark.full
def test_step_overhead_prints_the_share(tmp_path: Path) -> None:
    printed = run("step_overhead.py", "--steps", "2", "--updates", "2")
    found = re.search(r"^  overhead +([\d.]+)%", printed, re.MULTILINE)
    assert found is not None, printed
    assert 0 < float(found[1]) < 100


@pytest.mark.campaign
def test_overlap_shows_that_steps_ahead_hide_the_rollout() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--steps", "6", "--prompts", "8"],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode in (0, 1), (
        done.stderr
    )  # 1: above the target, which a busy host may cause
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [result["max_staleness"] for result in results] == [0, 1, 2]
    synchronous, one_ahead, two_ahead = results
    # Half of the time is idle without steps ahead, next to none with them; a busy host blurs both.
    assert synchronous["idle"] > 1.5 * two_ahead["idle"] and synchronous["idle"] > one_ahead["idle"]
    # A server that the host delays responds after the next update, from younger weights.
    assert (
        synchronous["lag_mean"] == 0 < one_ahead["lag_mean"] <= 1
        and one_ahead["lag_mean"] < two_ahead["lag_mean"] <= 2
    )
