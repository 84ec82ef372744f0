"""Certificates of hybrids: each layout, objective and resume against the reference in float64; red
for planted errors.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.errors import ConfigError
from pacs_megatron.workbench.certify.run import certify
from tests.support.needs import needs_delta_nets
from tests.support.policies.certify_runs import write_run
from tests.support.policies.hybrid_runs import HYBRID_RUNS
from tests.support.policies.injected_errors import is_number
from tests.support.tiers import in_test

PACS = {"name": "pacs"}
GRPO = {"name": "grpo", "kl_coef": 0.1}
PPO = {"name": "ppo"}
SHARDED = {"distributed_optimizer": True}
FULL = {"recompute": {"granularity": "full"}}
SELECTIVE = {"recompute": {"granularity": "selective"}}
TIED = "qwen3_5-tied-odd-vocabulary"
# name -> (family case, ranks, parallel options, objective). A step has two updates, and the second
# attempt resumes in another layout.
RUNS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2, pacs": ("qwen3_5", 2, {"tp": 2, "sequence_parallel": False}, PACS),
    "tp2 sp, grpo": ("qwen3_5", 2, {"tp": 2, "sequence_parallel": True}, GRPO),
    "pp2, ppo": ("qwen3_next", 2, {"pp": 2}, PPO),
    "vpp2, pacs": ("qwen3_5", 2, {"pp": 2, "vpp": 2}, PACS),
    "cp2, grpo": ("qwen3_5", 2, {"cp": 2}, GRPO),
    "ep2, ppo": ("qwen3_next", 2, {"ep": 2}, PPO),
    "tp2 ep2, pacs": ("qwen3_next", 2, {"tp": 2, "ep": 2, "sequence_parallel": True}, PACS),
    "dp2, grpo": ("qwen3_5_moe", 2, {}, GRPO),
    "dp2 sharded, ppo": ("qwen3_next", 2, SHARDED, PPO),
    "recompute full, pacs": (TIED, 1, FULL, PACS),
    "recompute selective tp2, grpo": ("qwen3_5-yarn", 2, {"tp": 2} | SELECTIVE, GRPO),
    "cp2 dp2 sharded, ppo": ("qwen3_next", 4, {"cp": 2} | SHARDED, PPO),
}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """`certify` sets variables for the processes that it forks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@needs_delta_nets
@pytest.mark.parametrize("name", in_test(RUNS, "tp2, pacs", "tp2 ep2, pacs"))
def test_a_hybrid_is_green(tmp_path: Path, name: str) -> None:
    family, nproc, parallel, objective = RUNS[name]
    changes = {"run": {"nproc": nproc}, "parallel": parallel, "objective": objective}
    certificate = certify(write_run(tmp_path, changes, family), [], out=tmp_path / "out")
    assert certificate is not None
    assert certificate.is_green, certificate.line()


@needs_delta_nets
@pytest.mark.campaign
@pytest.mark.parametrize("name", HYBRID_RUNS)
def test_every_layout_with_every_objective_is_green(tmp_path: Path, name: str) -> None:
    family, changes = HYBRID_RUNS[name]
    certificate = certify(write_run(tmp_path, changes, family), [], out=tmp_path / "out")
    assert certificate is not None
    assert certificate.is_green, certificate.line()


def test_a_critic_without_a_class_of_transformers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no critic of qwen3_5_text"):
        certify(write_run(tmp_path, {"objective": PPO}, "qwen3_5"), [], out=tmp_path / "out")


def _norm_of_own_heads(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a delta net's norm is not summed over the ranks, as in Megatron without
    sequence parallelism.
    """
    from pacs_megatron.policy.gated_delta import HeadNorm

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    patch.setattr(HeadNorm, "forward", forward)


def _decay_in_bf16(patch: pytest.MonkeyPatch) -> None:
    from pacs_megatron.policy.gated_delta import DeltaNet

    original = DeltaNet._compute_g_and_beta

    def rounded(self: Any, *args: Any) -> Any:
        decay, beta = original(self, *args)
        return decay.bfloat16().float(), beta

    patch.setattr(DeltaNet, "_compute_g_and_beta", rounded)


def _state_leaks(patch: pytest.MonkeyPatch) -> None:
    """One recurrence over all packed samples."""
    from megatron.core.ssm.gated_delta_net import gdn

    from pacs_megatron.parallel import delta_rule

    def leaking(*args: Any, cu_seqlens: Any, **options: Any) -> Any:
        return delta_rule.gated_delta_rule(*args, **options)

    patch.setattr(gdn, "chunk_gated_delta_rule", leaking)


def _gate_before_norm(patch: pytest.MonkeyPatch) -> None:
    from pacs_megatron.policy.gated_delta import DeltaNet

    def gated(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out_norm((x * self.act_fn(gate)).reshape(-1, x.shape[-1]))
        return found

    patch.setattr(DeltaNet, "_apply_gated_norm", gated)


PLANTED = (_norm_of_own_heads, _decay_in_bf16, _state_leaks, _gate_before_norm)


@needs_delta_nets
@pytest.mark.full
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_red_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    # With the redirections of a host without CUDA; the ranks are forked from this process.
    importlib.import_module("pacs_megatron.policy.model")
    plant(monkeypatch)
    family, nproc, parallel, objective = RUNS["tp2, pacs"]
    changes = {"run": {"nproc": nproc}, "parallel": parallel, "objective": objective}
    certificate = certify(write_run(tmp_path, changes, family), [], out=tmp_path / "out")
    assert certificate is not None
    assert is_number(certificate.content["first_deviation"]), certificate.line()
