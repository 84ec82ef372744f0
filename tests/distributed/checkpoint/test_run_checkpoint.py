"""Training checkpoints on the real policy: continued steps are the same at the same layout, and
agree at another.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.checkpoint.names import MANIFEST_NAME
from pacs_megatron.errors import CheckpointError
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.parallel.control import ControlChannel
from tests.support.policies.policy_cases import make_policy, train
from tests.support.ranks import RankError, run_ranks
from tests.support.saved_policies import FROZEN, STEPS, continued, load, save
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True, num_hidden_layers=4)


def saving(
    model: Path, folder: Path, options: dict[str, Any]
) -> Callable[[int, int], dict[str, Any]]:
    def on_rank(_rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(model, world, optimizer={"lr": 1e-3}, **options)
        policy.take_reference(reset_optimizer=False)
        train(policy, build_objective(FROZEN, updates_per_step=1), STEPS[:3])
        save(policy, folder, 3, model)
        return continued(policy)

    return on_rank


def loading(
    model: Path, folder: Path, options: dict[str, Any]
) -> Callable[[int, int], dict[str, Any]]:
    def on_rank(_rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(model, world, optimizer={"lr": 1e-3}, **options)
        load(policy, folder)
        return continued(policy)

    return on_rank


@pytest.mark.parametrize(
    ("saved_with", "world", "options"),
    [
        pytest.param("tp2", 2, {"tp": 2}, marks=pytest.mark.full),
        ("tp2pp2-distopt", 4, {"tp": 2, "pp": 2, "distributed_optimizer": True}),
        ("dp2-distopt-bf16", 2, {"distributed_optimizer": True, "dtype": "bf16"}),
    ],
)
def test_resume_at_the_same_and_at_other_layouts(
    model: Path, tmp_path: Path, saved_with: str, world: int, options: dict[str, Any]
) -> None:
    expected = run_ranks(saving(model, tmp_path, options), world)[0]
    same = run_ranks(loading(model, tmp_path, options), world)[0]
    assert same["loss"] == expected["loss"] and same["norm"] == expected["norm"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][name], weight, err_msg=name)
    kept = {k: v for k, v in options.items() if k in ("distributed_optimizer", "dtype")}
    tolerance = 2e-2 if options.get("dtype") == "bf16" else 1e-5
    for layout in ({}, {"pp": 2}):
        other = run_ranks(loading(model, tmp_path, kept | layout), layout.get("pp", 1))[0]
        np.testing.assert_allclose(other["loss"], expected["loss"], rtol=tolerance)
        np.testing.assert_allclose(other["norm"], expected["norm"], rtol=tolerance)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_each_data_parallel_rank_keeps_its_own_optimizer_state(tmp_path: Path, family: str) -> None:
    """A save takes no more than this rank's share: no rank gathers the others', in host memory or
    on a GPU.
    """
    folder = make_family(tmp_path, family)

    def on_rank(_rank: int, world: int) -> tuple[int, int]:
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        from pacs_megatron.policy import state

        policy = make_policy(folder, world, distributed_optimizer=True)
        optimizer = state.sharded_state(policy, is_loading=False, with_reference=False)[
            state.OPTIMIZER
        ]
        del optimizer["step"]
        own = sum(tensor.numel() for tensor in policy.optimizer.tensors() if tensor.dim())
        return sum(box.data.numel() for box in nested_values(optimizer)), own

    for found, own in run_ranks(on_rank, 2):
        assert found == own > 0


@pytest.mark.parametrize("shape", [(7,), (1, 5), (4, 3), (3, 1), (2, 3, 4), (1, 1, 6), (3, 1, 2)])
def test_boxes_cover_every_flat_range(shape: tuple[int, ...]) -> None:
    from pacs_megatron.policy.state import _rows

    whole = torch.arange(int(np.prod(shape))).view(shape)
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            boxes = [
                whole[
                    tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))
                ].flatten()
                for offset, sizes in _rows(shape, start, stop)
            ]
            found = torch.cat([*boxes, torch.empty(0, dtype=torch.long)])
            assert found.tolist() == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize(
    ("distributed", "dtype"),
    [
        pytest.param(False, "fp32", marks=pytest.mark.full, id="plain-fp32"),
        pytest.param(False, "bf16", id="plain-bf16"),
        pytest.param(True, "fp32", id="distopt-fp32"),
        pytest.param(True, "bf16", marks=pytest.mark.full, id="distopt-bf16"),
    ],
)
def test_a_checkpoint_before_the_first_update_resumes(
    model: Path, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    """A signal during the first rollouts saves step 0:

    Megatron leaves Adam's step of 0 out of the file.
    """
    options = {"dtype": dtype, "distributed_optimizer": distributed}

    def on_rank(_rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(model, world, optimizer={"lr": 1e-3}, **options)
        policy.take_reference(reset_optimizer=False)
        save(policy, tmp_path, 0, model)
        return continued(policy)

    expected = run_ranks(on_rank, 2)[0]
    resumed = run_ranks(loading(model, tmp_path, options), 2)[0]
    assert resumed["loss"] == expected["loss"] and resumed["norm"] == expected["norm"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(resumed["weights"][name], weight, err_msg=name)


def test_damage_is_named_and_old_checkpoints_go(model: Path, tmp_path: Path) -> None:
    def on_rank(_rank: int, world: int) -> list[str]:
        policy = make_policy(model, world)
        for step in (1, 2, 3):
            save(policy, tmp_path, step, model)
        kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        newest = run_checkpoint.latest_checkpoint(tmp_path)
        assert newest is not None
        shard = max((newest / "dist").glob("*.distcp"), key=lambda path: path.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(bytes(data))
        with pytest.raises(CheckpointError, match=shard.name):
            run_checkpoint.verify_checkpoint(newest, ControlChannel(policy.rank))
        (newest / MANIFEST_NAME).unlink()
        before = run_checkpoint.latest_checkpoint(tmp_path)
        assert before is not None
        run_checkpoint.verify_checkpoint(before, ControlChannel(policy.rank))
        (before / "state.json").unlink()
        with pytest.raises(CheckpointError, match=r"state\.json is missing"):
            run_checkpoint.verify_checkpoint(before, ControlChannel(policy.rank))
        return kept

    assert run_ranks(on_rank, 1)[0] == ["step_000002", "step_000003"]


def dist_bytes(checkpoint: Path) -> dict[int, int]:
    """Bytes of tensors by the rank that wrote them."""
    sizes: dict[int, int] = {}
    for file in (checkpoint / "dist").glob("__*_*.distcp"):
        rank = int(file.name.split("_")[2])
        sizes[rank] = sizes.get(rank, 0) + file.stat().st_size
    return sizes


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"distributed_optimizer": True, "dtype": "bf16"}),
        pytest.param(4, {"tp": 2, "distributed_optimizer": True}, marks=pytest.mark.full),
    ],
)
def test_data_parallel_ranks_divide_a_checkpoint(
    model: Path, tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    """Every rank writes its share of what several ranks hold; one rank reads all of it and
    continues to the same bits.
    """
    expected = run_ranks(saving(model, tmp_path, options), world)[0]
    checkpoint = run_checkpoint.latest_checkpoint(tmp_path)
    assert checkpoint is not None
    sizes = dist_bytes(checkpoint)
    assert set(sizes) == set(range(world))
    assert max(sizes.values()) < 1.2 * min(sizes.values())
    files = {file.relative_to(checkpoint).as_posix() for file in (checkpoint / "dist").iterdir()}
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert files <= set(listed)
    found = run_ranks(loading(model, tmp_path, options), world)[0]
    assert found["loss"] == expected["loss"] and found["norm"] == expected["norm"]


def test_a_rank_that_dies_in_a_parallel_save_leaves_no_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    """The earlier checkpoint stays the newest; the next save removes what is left and succeeds."""

    def dying(rank: int, world: int) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        policy = make_policy(model, world)
        policy.take_reference(reset_optimizer=False)
        save(policy, tmp_path, 1, model)
        original = FileSystemWriter.write_data

        def write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args, **kwargs)

        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
        save(policy, tmp_path, 2, model)

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(dying, 2)
    newest = run_checkpoint.latest_checkpoint(tmp_path)
    assert newest is not None and newest.name.endswith("1")
    run_ranks(saving(model, tmp_path, {}), 2)
    newest = run_checkpoint.latest_checkpoint(tmp_path)
    assert newest is not None and newest.name.endswith("3") and set(dist_bytes(newest)) == {0, 1}
    assert not list(tmp_path.glob("*.partial"))
