"""NVIDIA Apex, where it is importable: Megatron-Core's choice, its calls, and its Adam.

Apex is a stand-in with its names and signatures (tests/support/apex_stand_in).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.policies.apex_run import LAYOUTS, OPTIMIZER, steps, updated
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss

ROOT = Path(__file__).parents[3]


def torchs_weights(model: Path) -> dict[str, np.ndarray]:
    """Weights after the same updates of transformers' model by torch's AdamW in fp32."""
    trainer = PlainTrainer(model)
    matrices = [p for p in trainer.model.parameters() if p.dim() > 1]
    others = [p for p in trainer.model.parameters() if p.dim() == 1]
    defaults = trainer.optimizer.defaults
    trainer.optimizer = torch.optim.AdamW(
        [{"params": matrices, **OPTIMIZER}, {"params": others, "weight_decay": 0.0}],
        lr=defaults["lr"],
        betas=defaults["betas"],
        eps=defaults["eps"],
    )
    for step in steps():
        trainer.update(*step, pacs_loss(trainer.logprobs(*step), step[0]))
    return trainer.weights()


@pytest.fixture(scope="module")
def with_apex(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a process in which Apex is importable."""
    out = tmp_path_factory.mktemp("apex")
    command = [sys.executable, "-m", "tests.support.policies.apex_run", str(tiny_qwen3), str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def report(with_apex: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((with_apex / "report.json").read_text())
    return found


FP32 = [name for name in LAYOUTS if name != "bf16"]


def test_updates_with_apex_equal_torchs_adamw(
    tiny_qwen3: Path, with_apex: Path, report: dict[str, Any]
) -> None:
    expected = torchs_weights(tiny_qwen3)
    arrays = np.load(with_apex / "weights.npz")
    for layout in FP32:
        assert report[layout]["adam"] == ["apex.optimizers"]
        assert report[layout]["adam_step"] == 3
        for name, weight in expected.items():
            np.testing.assert_allclose(
                arrays[f"{layout}/{name}"], weight, atol=5e-6, err_msg=f"{layout} {name}"
            )


def test_megatron_calls_apexs_kernels(report: dict[str, Any]) -> None:
    assert "FusedAdam of NVIDIA Apex, fused weight gradients of NVIDIA Apex" in report["line"]
    for layout in LAYOUTS:
        calls: dict[str, int] = report[layout]["calls"]
        # Three updates of two parameter groups: with decay and without.
        assert calls["multi_tensor_adam"] == 6, (layout, calls)
        assert calls["multi_tensor_l2norm"] >= 3, (layout, calls)
    for layout in FP32:
        assert "wgrad_gemm_accum_fp32" not in report[layout]["calls"]


def test_the_fused_weight_gradient_is_the_gradient(
    tiny_qwen3: Path, report: dict[str, Any]
) -> None:
    """bf16: the sum over micro-batches is fp32 in both, a product is rounded to bf16 without
    Apex.
    """
    of_apex = report["bf16"]
    # Four matrices of a layer in every micro-batch of three updates.
    matrices = 4 * of_apex["num_layers"]
    assert of_apex["calls"]["wgrad_gemm_accum_fp32"] % matrices == 0
    assert of_apex["calls"]["wgrad_gemm_accum_fp32"] > 3 * matrices
    _, plain = updated(tiny_qwen3, "bf16")
    assert plain["calls"] == {} and plain["adam"] == ["torch.optim.adamw"]
    np.testing.assert_allclose(of_apex["grad_norms"], plain["grad_norms"], rtol=2e-2)


@pytest.fixture
def apex_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in as `apex`; after the test this process has no Apex again."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/support/apex_stand_in"))
    before = set(sys.modules)
    yield

    # Not by monkeypatch, which would put the modules back.
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", "amp_C"):
            del sys.modules[name]


@pytest.mark.usefixtures("apex_importable")
def test_the_stand_ins_adam_is_torchs() -> None:
    """Both modes, with decay and without bias correction too, over ten steps."""
    from apex.optimizers import FusedAdam

    for mode, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        torch.manual_seed(0)
        ours = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
        fused = FusedAdam(ours, adam_w_mode=mode, **options)
        plain = reference(theirs, **options)
        for _ in range(10):
            for one, other in zip(ours, theirs, strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            fused.step()
            plain.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
