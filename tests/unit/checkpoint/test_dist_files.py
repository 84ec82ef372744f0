"""Megatron's save and load with our strategy, on the installed Megatron-Core."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from pacs_megatron.errors import CheckpointError
from tests.support.ranks import run_ranks


def _save_and_load(folder: Path) -> tuple[int, bool]:
    """(calls of our strategy, whether the loaded tensor is equal)."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from pacs_megatron.checkpoint import dist_files

    calls = 0
    real = dist_files.PlainTorchDistSave.save

    def counted(self: Any, state: dict[str, Any], target: Any) -> None:
        nonlocal calls
        calls += 1
        real(self, state, target)

    dist_files.PlainTorchDistSave.save = counted  # type: ignore[method-assign]
    saved = torch.arange(6.0)
    folder.mkdir()
    state = {"w": ShardedTensor.from_rank_offsets("w", saved.clone())}
    dist_files.prepare_sharded(state, folder).write(folder)
    found = dist_files.load_sharded(
        {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}, folder
    )
    return calls, torch.equal(found["w"], saved)


def test_megatron_calls_our_strategy_and_does_not_replace_it(tmp_path: Path) -> None:
    assert run_ranks(lambda _rank, _world: _save_and_load(tmp_path / "dist"), 1) == [(1, True)]


def _load_more(folder: Path) -> str:
    """The error of a load that needs a tensor which the folder lacks."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from pacs_megatron.checkpoint import dist_files

    folder.mkdir()
    dist_files.prepare_sharded(
        {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}, folder
    ).write(folder)
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(6)) for key in ("w", "reference.w")
    }
    try:
        dist_files.load_sharded(state, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    [message] = run_ranks(lambda _rank, _world: _load_more(tmp_path / "dist"), 1)
    assert (
        message.startswith(f"{tmp_path}/dist does not have what this run needs")
        and "reference.w" in message
    )


@pytest.mark.skipif(
    Version(version("megatron-core")) >= Version("0.17"), reason="0.17 and later read this format"
)
def test_a_checkpoint_of_a_later_megatron_is_rejected_by_name(tmp_path: Path) -> None:
    from pacs_megatron.checkpoint.dist_files import load_sharded

    with pytest.raises(CheckpointError, match=r"megatron-core 0\.17 or later wrote it"):
        load_sharded({}, tmp_path)
