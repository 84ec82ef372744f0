"""The quickstart with adapters: three seeds learn, beside all weights and shuffled labels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.observability.metrics import read_metrics

REPO = Path(__file__).resolve().parents[4]
RUNS = REPO / "configs" / "runs"
AS_LONG = ("run.steps=20", "checkpoint.every=20")
"""all weights for as many steps as the adapters"""
MARGIN = 0.3
"""of pass@1 over the control: 768 draws have a standard error of at most 0.018"""
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def python(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's warm start, and its run of all weights with seed 0."""
    folder = tmp_path_factory.mktemp("runs")
    python("examples.quickstart.run", "--dir", str(folder), *AS_LONG)
    return folder


def train(base: Path, config: str, name: str, seed: int, *overrides: str) -> list[float]:
    """pass@1 of the held-out problems at the start and at the end of a run."""
    python(
        "pacs_megatron",
        "train",
        str(RUNS / config),
        f"run.dir={base}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"model.path={base}/quickstart-warmstart/hf",
        f"data.train.path={base}/quickstart-inputs/data/train.json",
        f"evaluation.benchmarks.0.path={base}/quickstart-inputs/data/test.json",
        *overrides,
    )
    return pass_at_1(base / name)


def pass_at_1(run_dir: Path) -> list[float]:
    values = []
    for row in read_metrics(run_dir):
        if "eval/test/pass@1" in row:
            values.append(float(row["eval/test/pass@1"] or 0.0))
    return values


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adapters_learn_and_shuffled_labels_do_not(base: Path, seed: int) -> None:
    adapters = train(base, "quickstart-lora.yaml", f"lora{seed}", seed)
    control = train(
        base, "quickstart-lora.yaml", f"control{seed}", seed, "data.shuffle_labels=true"
    )
    whole = pass_at_1(base / "quickstart")
    if seed:
        whole = train(base, "quickstart.yaml", f"whole{seed}", seed, *AS_LONG)
    print(f"seed {seed}: adapters {adapters}, control {control}, all weights {whole}")

    assert len(adapters) == len(control) == len(whole) == 2
    assert adapters[-1] > control[-1] + MARGIN
    assert adapters[-1] > adapters[0] + MARGIN
    assert adapters[-1] > whole[-1] - 0.1

    # The merged export answers as the frozen model with its adapters does.
    checked = json.loads(python("examples.quickstart.check", str(base / f"lora{seed}")))
    assert checked["different_answers"] == 0
    assert checked["tokens"] > 100
