"""`policy.offload`: the same bits with and without, and an export or a checkpoint while the state
is in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.policy_cases import make_policy, random_step, train
from tests.support.ranks import run_ranks
from tests.support.saved_policies import load, save
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family

STEPS = [random_step(seed) for seed in range(4)]
OBJECTIVE = PacsOptions(name="pacs", reference="frozen")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16-tp2-dp2-distributed": (4, {"dtype": "bf16", "tp": 2, "distributed_optimizer": True}),
    "bf16-dp2-overlap": (
        2,
        {
            "dtype": "bf16",
            "distributed_optimizer": True,
            "megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        },
    ),
    "bf16-tp2": (2, {"dtype": "bf16", "tp": 2}),
    "fp32-dp2-distributed": (2, {"distributed_optimizer": True}),
    "fp32-pp2-recompute": (2, {"pp": 2, "recompute": {"granularity": "full"}}),
    "moe-ep2-distributed": (2, {"dtype": "bf16", "ep": 2, "distributed_optimizer": True}),
}


def device_bytes(policy: Any) -> dict[str, int]:
    """Bytes of the storages on the device."""
    weights = []
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            weights.append(parameter)
    mine = {parameter.untyped_storage()._cdata for parameter in weights}
    shown = [data for _, data in policy.offload._shown] or [
        tensor
        for tensor in policy.optimizer.tensors()
        if tensor.untyped_storage()._cdata not in mine
    ]
    groups = {
        "weights": weights,
        "gradients": [parameter.main_grad for parameter in weights],
        "optimizer": shown,
    }
    return {
        name: sum(tensor.untyped_storage().nbytes() for tensor in found)
        for name, found in groups.items()
    }


def trained(
    model: Path, folder: Path, offload: str, options: dict[str, Any]
) -> Callable[[int, int], dict[str, Any]]:
    def on_rank(_rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(model, world, offload=offload, **options)  # type: ignore[arg-type]
        policy.take_reference(reset_optimizer=False)
        objective = build_objective(OBJECTIVE, updates_per_step=1)
        found: dict[str, Any] = {"norms": [], "exports": []}

        def export() -> None:
            found["exports"].append(
                {name: tensor.clone() for name, tensor in policy.export_weights()}
            )

        for number, step in enumerate(STEPS):
            policy.offload.to_host()
            policy.offload.to_host()  # a retry of the sync
            if number == 2:
                save(policy, folder, 2, model)
            export()
            found["held"] = device_bytes(policy)
            policy.offload.to_device()
            found["norms"] += [report.grad_norm for report in train(policy, objective, [step])]
        export()
        return found

    return on_rank


def resumed(
    model: Path, folder: Path, options: dict[str, Any]
) -> Callable[[int, int], dict[str, torch.Tensor]]:
    def on_rank(_rank: int, world: int) -> dict[str, torch.Tensor]:
        policy = make_policy(model, world, **options)
        load(policy, folder)
        train(policy, build_objective(OBJECTIVE, updates_per_step=1), STEPS[2:])
        return {name: tensor.clone() for name, tensor in policy.export_weights()}

    return on_rank


@pytest.mark.parametrize("layout", in_test(LAYOUTS, "fp32-dp2-distributed"))
def test_same_bits_and_a_checkpoint_from_host_memory(tmp_path: Path, layout: str) -> None:
    world, options = LAYOUTS[layout]
    model = make_family(
        tmp_path / "model", "qwen3_moe" if "moe" in layout else "qwen3", dtype="bfloat16"
    )
    runs = {
        kind: run_ranks(trained(model, tmp_path / kind, kind, options), world)
        for kind in ("none", "optimizer", "all")
    }
    for kind, ranks in runs.items():
        for mine, expected in zip(ranks, runs["none"], strict=True):
            assert mine["norms"] == expected["norms"] and all(norm > 0 for norm in mine["norms"])
            for ours, theirs in zip(mine["exports"], expected["exports"], strict=True):
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
            on_device = {name for name, num_bytes in mine["held"].items() if num_bytes}
            full = {"weights", "gradients", "optimizer"}
            assert on_device == {"none": full, "optimizer": {"weights"}, "all": set()}[kind]
    for kind in ("optimizer", "all"):
        assert run_checkpoint.latest_checkpoint(tmp_path / kind) is not None
        final = run_ranks(resumed(model, tmp_path / kind, options), world)[0]
        assert all(
            torch.equal(tensor, final[name])
            for name, tensor in runs["none"][0]["exports"][-1].items()
        )
