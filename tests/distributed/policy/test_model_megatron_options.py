"""`parallel.megatron` and `recompute.modules` in a policy: the same bits with and without overlap,
in any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.policy_cases import make_policy, train
from tests.support.ranks import run_ranks
from tests.support.saved_policies import FROZEN, STEPS, continued, load, save
from tests.support.tiny_families import make_family

STEP_START = PacsOptions(name="pacs")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp2-distopt": ("qwen3", 2, {"distributed_optimizer": True}),
    "vpp2-dp2-distopt": ("qwen3", 4, {"pp": 2, "vpp": 2, "distributed_optimizer": True}),
    "ep2-distopt": ("qwen3_moe", 2, {"ep": 2, "distributed_optimizer": True}),
    "tied-pp2-dp2": ("qwen3-tied-mha-odd-vocabulary", 4, {"pp": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = {family for family, _, _ in LAYOUTS.values()}
    shape = {"vocab_size": 272, "num_hidden_layers": 4}
    return {
        family: make_family(tmp_path_factory.mktemp(family), family, **shape) for family in families
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied-mha-odd-vocabulary"])
def test_small_buckets_change_no_bit(folders: dict[str, Path], family: str) -> None:
    """A model of true size has many buckets, and its output layer has one of its own.

    Two updates in a row: nothing between them gathers the weights of the output layer.
    """

    def training(megatron: dict[str, Any]) -> Any:
        def on_rank(_rank: int, world: int) -> Any:
            from pacs_megatron.policy import model

            class SmallBuckets(model.DistributedDataParallelConfig):
                def __init__(self, **options: Any) -> None:
                    super().__init__(bucket_size=1, **options)

            model.DistributedDataParallelConfig = SmallBuckets
            policy = make_policy(
                folders[family],
                world,
                tokens_per_microbatch=64,
                distributed_optimizer=True,
                megatron=megatron,
                clip_grad=0.0,  # the order in which the norm is summed depends on the buckets
            )
            assert not megatron or len(policy.chunks[0].bucket_groups) > 4
            objective = build_objective(STEP_START, updates_per_step=1)
            reports = train(policy, objective, STEPS[:3], tokens_per_microbatch=64)
            return {
                "loss": [report.metrics["objective/loss"] for report in reports],
                "weights": {name: tensor.clone() for name, tensor in policy.export_weights()},
            }

        return run_ranks(on_rank, 2)[0]

    expected = training({})
    overlapped = training(OVERLAP)
    assert overlapped["loss"] == expected["loss"]
    for key, weight in expected["weights"].items():
        np.testing.assert_array_equal(overlapped["weights"][key], weight, err_msg=key)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "dp2-distopt" else pytest.param(name, marks=pytest.mark.full)
        for name in LAYOUTS
    ],
)
def test_overlap_changes_no_bit(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Three updates with a frozen reference, a save between them, three more; and a resume of the
    save without overlap.

    The export, the reference and the checkpoint read the weights before a forward pass could gather
    them.
    """
    family, world, parallel = LAYOUTS[name]
    overlap = (
        dict(OVERLAP) if "distributed_optimizer" in parallel else {"overlap_grad_reduce": True}
    )

    def training(megatron: dict[str, Any], folder: Path) -> Any:
        def on_rank(_rank: int, world: int) -> Any:
            policy = make_policy(
                folders[family], world, tokens_per_microbatch=64, megatron=megatron, **parallel
            )
            assert policy.chunks[0].ddp_config.overlap_grad_reduce is bool(megatron)
            policy.take_reference(reset_optimizer=False)
            train(
                policy,
                build_objective(FROZEN, updates_per_step=1),
                STEPS[:3],
                tokens_per_microbatch=64,
            )
            policy.take_reference(reset_optimizer=True)
            save(policy, folder, 3, folders[family])
            return continued(policy)

        return run_ranks(on_rank, world)[0]

    def resuming(_rank: int, world: int) -> Any:
        policy = make_policy(folders[family], world, tokens_per_microbatch=64, **parallel)
        load(policy, tmp_path / "on")
        return continued(policy)

    expected = training({}, tmp_path / "off")
    for found in (training(overlap, tmp_path / "on"), run_ranks(resuming, world)[0]):
        assert found["loss"] == expected["loss"] and found["norm"] == expected["norm"]
        for key, weight in expected["weights"].items():
            np.testing.assert_array_equal(found["weights"][key], weight, err_msg=key)


def test_recomputed_modules_change_no_bit(folders: dict[str, Path]) -> None:
    modules = ["core_attn", "mlp"]

    def training(recompute: dict[str, Any]) -> Any:
        def on_rank(_rank: int, world: int) -> Any:
            policy = make_policy(
                folders["qwen3"], world, tp=2, sequence_parallel=True, recompute=recompute
            )
            policy.take_reference(reset_optimizer=False)
            assert not recompute or policy.config.recompute_modules == modules
            return continued(policy)

        return run_ranks(on_rank, 2)[0]

    expected = training({})
    found = training({"granularity": "selective", "modules": modules})
    assert found["norm"] == expected["norm"]
    for key, weight in expected["weights"].items():
        np.testing.assert_array_equal(found["weights"][key], weight, err_msg=key)
