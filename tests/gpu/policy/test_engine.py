"""On a real GPU: every precision against the CPU path in fp32, through benchmarks/train_step.py in
its own processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# (log-prob mean difference in nats, relative loss and gradient-norm differences); FP8 has 3 bits of
# mantissa.
TOLERANCES = {
    "fp32": (1e-4, 1e-4, 1e-3),
    "bf16": (2e-2, 5e-3, 5e-2),
    "fp8-tensorwise": (1e-1, 2e-2, 2e-1),
    "fp8-blockwise": (1e-1, 2e-2, 2e-1),
    "fp8-delayed": (2e-1, 5e-2, 3e-1),
}
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # By NVML, so that this process has no CUDA context beside the measured one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this host")
    out = tmp_path_factory.mktemp("train_step")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "train_step.py"),
        "--only-check",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [*command, "--cases", *TOLERANCES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + (out / "raw.log").read_text()[-8000:]
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", TOLERANCES)
def test_it_equals_the_cpu_path_within_the_stated_tolerance(
    measured: dict[str, Any], case: str
) -> None:
    check = measured["rows"][case]["check"]
    if case.startswith("fp8") and "needs" in check.get("refused", ""):
        pytest.skip(check["refused"])
    assert "refused" not in check, check
    logprob, loss, norm = TOLERANCES[case]
    assert check["logprob_diff_mean"] < logprob
    assert check["loss_rel_diff"] < loss
    assert check["grad_norm_rel_diff"] < norm
    assert check["sft_grad_norm_rel_diff"] < norm


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", ["fp32", "bf16", "fp8-tensorwise", "fp8-blockwise"])
def test_scores_at_unchanged_weights_are_zero(measured: dict[str, Any], case: str) -> None:
    """Not claimed for `delayed`, whose scales move from pass to pass."""
    check = measured["rows"][case]["check"]
    if case.startswith("fp8") and "needs" in check.get("refused", ""):
        pytest.skip(check["refused"])
    assert check["score_floor"] == 0.0 and check["score_drift"] == 0.0, check


@pytest.mark.timeout(1200)
def test_bf16_uses_transformer_engine_where_it_is_installed(measured: dict[str, Any]) -> None:
    from importlib.util import find_spec

    if find_spec("transformer_engine_torch") is None:
        pytest.skip("Transformer Engine is not installed")
    assert "using Transformer Engine" in measured["rows"]["bf16"]["check"]["used"]
