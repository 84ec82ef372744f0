"""`make quickstart`: its plumbing on every run of the tests, its promise (three seeds and a
control) in the long ones.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.observability.metrics import read_metrics

REPO = Path(__file__).resolve().parents[4]


def quickstart(folder: Path, *arguments: str, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.quickstart.run", "--dir", str(folder), *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def pass_at_1(run_dir: Path) -> list[float]:
    return [
        float(row["eval/test/pass@1"] or 0.0)
        for row in read_metrics(run_dir)
        if "eval/test/pass@1" in row
    ]


@pytest.mark.full
def test_a_short_quickstart_leaves_a_run_and_an_identical_export(tmp_path: Path) -> None:
    profile = "observability.profile={steps: [2], ranks: [0, 1]}"
    out = quickstart(tmp_path, "--short", profile, timeout_s=850)
    checked = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert checked["different_answers"] == 0 and checked["tokens"] > 100
    last = out.strip().splitlines()[-3:]
    assert (
        last[0].startswith("pass@1 ") and "report.html" in last[1] and last[2].startswith("next: ")
    )
    run_dir = tmp_path / "quickstart"
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    wanted = {
        "reward/mean",
        "objective/loss",
        "optimizer/grad_norm",
        "pacs/residual_mean",
        "response/len_mean",
    }
    assert wanted <= rows[1].keys() and "tokens_per_s" in rows[1] and "time/update_s" in rows[1]
    for name in (
        "config.yaml",
        "report.html",
        "hf/model.safetensors",
        "hf/tokenizer.json",
        "rollouts",
        "tensorboard",
    ):
        assert (run_dir / name).exists(), name
    assert (run_dir / "checkpoints" / "step_000003" / "manifest.json").is_file()

    for rank in (0, 1):
        trace = run_dir / "profile" / f"rank{rank}.2.pt.trace.json.gz"
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert {"step 2", "rollout", "update"} <= {event["name"] for event in events}
    assert rows[2]["speed/tflops_per_gpu"] > 0
    assert "<h2>Ranks</h2>" in (run_dir / "report.html").read_text()


@pytest.mark.campaign
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_seed_learns(tmp_path: Path, seed: int) -> None:
    print(quickstart(tmp_path, "--seed", str(seed), timeout_s=1400))
    curve = pass_at_1(tmp_path / "quickstart")
    assert 0.1 <= curve[0] <= 0.5
    assert curve[-1] >= 0.90


@pytest.mark.campaign
@pytest.mark.timeout(1500)
def test_control_with_shuffled_labels_does_not_learn(tmp_path: Path) -> None:
    print(quickstart(tmp_path, "--shuffle-labels", timeout_s=1400))
    curve = pass_at_1(tmp_path / "quickstart")
    assert curve[-1] <= curve[0]
