"""The reward of the hybrid quickstart rises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.observability.metrics import read_metrics
from tests.support.needs import needs_delta_nets

REPO = Path(__file__).resolve().parents[4]
pytestmark = [pytest.mark.full, needs_delta_nets]


def rewards(folder: Path, *arguments: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-m", "examples.quickstart.hybrid", "--dir", str(folder), *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("reward ")
    rows = read_metrics(folder / "quickstart-hybrid")
    return [float(row["reward/mean"] or 0.0) for row in rows if "reward/mean" in row]


def test_its_reward_rises(tmp_path: Path) -> None:
    curve = rewards(tmp_path)
    assert len(curve) == 50
    assert sum(curve[:3]) / 3 < 0.4
    assert sum(curve[-3:]) / 3 > 0.8
    assert (tmp_path / "quickstart-hybrid" / "hf" / "model.safetensors").is_file()
