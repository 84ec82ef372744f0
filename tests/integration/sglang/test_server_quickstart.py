"""The quickstart with the real server: the same promise as the embedded engine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.run import make_inputs
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.integration.sglang.conftest import ROOT
from tests.support.needs import require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.campaign]


def train(config: str, *overrides: str, timeout_s: float) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pacs_megatron",
            "train",
            str(ROOT / "configs" / "runs" / config),
            *overrides,
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.timeout(3000)
def test_the_quickstart_learns_through_sglang(tmp_path: Path) -> None:
    require_sglang()
    inputs = tmp_path / "quickstart-inputs"
    common = (f"run.dir={tmp_path}", "run.seed=0")
    make_inputs(inputs, 0)
    train(
        "quickstart-warmstart.yaml",
        *common,
        f"model.path={inputs}/model",
        f"data.train.path={inputs}/data/demonstrations.json",
        timeout_s=1000,
    )
    train(
        "quickstart-sglang.yaml",
        *common,
        f"model.path={tmp_path}/quickstart-warmstart/hf",
        f"data.train.path={inputs}/data/train.json",
        f"evaluation.benchmarks.0.path={inputs}/data/test.json",
        timeout_s=1900,
    )
    run_dir = tmp_path / "quickstart-sglang"
    rows = read_metrics(run_dir)
    assert rows[-1]["step"] == 80
    curve = [float(row["eval/test/pass@1"] or 0.0) for row in rows if "eval/test/pass@1" in row]
    print("pass@1", curve)
    assert 0.1 <= curve[0] <= 0.5
    assert curve[-1] >= 0.90
    # The server samples in fp32 here: what is left is the order of additions.
    # (Rows of steps whose labels are all equal have no update, and so no comparison.)
    apart = [
        float(row["mismatch/logprob_abs_mean"] or 1.0)
        for row in rows
        if "mismatch/logprob_abs_mean" in row
    ]
    assert len(apart) > 70 and max(apart) < 1e-5
    for step in (1, 40, 80):
        versions = set()
        for sample in read_rollouts(rollout_path(run_dir, step)):
            for span in sample["spans"]:
                versions.add(span["version"])
        assert versions == {step - 1}
