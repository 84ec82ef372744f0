"""Saves and loads a sharded state dict in Megatron's `torch_dist` format, without helper processes.

Megatron's writer starts a manager process and a pool at the first save. They take 7 to 11 s on a
laptop, survive a killed rank and need an importable `__main__`. This module uses Megatron's planner
and format with torch's plain writer.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# This import comes before those of Megatron.
import pacs_megatron.parallel  # noqa: F401  # isort: skip

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from packaging.version import Version
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from pacs_megatron.checkpoint.dist_reader import COMMON_NAME, UNREADABLE
from pacs_megatron.errors import CheckpointError, one_line

Copy = Callable[[torch.Tensor], torch.Tensor]
"""Returns the values of a tensor, copied if they change before they are written"""


class PlainTorchDistSave(TorchDistSaveShardedStrategy):
    """Saves in two steps, in this process, with one file a rank.

    `save`, which Megatron calls, divides the tensors among the ranks and copies them. `write`
    writes them and flushes them to disk.

    Derived from Megatron's own strategy: from 0.17 on `dist_checkpointing.save` silently replaces
    any other class.
    """

    def __init__(self, copy: Copy) -> None:
        super().__init__("torch_dist", 1)
        self._copy = copy
        self._state: dict[str, Any] = {}

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Keeps copies of the tensors that this rank writes. Collective."""
        if parallel_state.is_initialized():
            # Divides tensors that several data-parallel ranks have among them, by size.
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            distribution = determine_main_replica_uniform_distribution(sharded_state_dict, group)
            distribute_main_replicas_with_precomputed_distribution(
                sharded_state_dict, group, distribution
            )

        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        for shards in renamed.values():
            for shard in shards:
                if isinstance(shard, ShardedTensor) and shard.data is not None:
                    shard.data = self._copy(shard.data)
        self._state = mcore_to_pyt_state_dict(renamed, False)

    @torch.no_grad()
    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """Writes this rank's files.

        Collective over `group`, a gloo group of all ranks; None: the default group.
        """
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, sync_files=True, thread_count=1
        )
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save(self._state, storage_writer=writer, planner=planner, process_group=group)
        self._state = {}  # frees the copies


def prepare_sharded(
    state: dict[str, Any], folder: Path, copy: Copy = lambda data: data
) -> PlainTorchDistSave:
    """Writes the common part of `state`; `write` of the result writes the rest. Collective.

    Args:
        state: a sharded state dict.
        folder: exists and is empty.
        copy: returns the values of a tensor that this rank writes. They must not change before
            `write` returns.
    """
    strategy = PlainTorchDistSave(copy)
    with torch.no_grad():
        dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
    return strategy


def load_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fills the sharded tensors of `state` from `folder` and returns the whole state dict.

    Collective.

    Raises CheckpointError if a later Megatron-Core wrote the folder than the installed one reads,
    or if a part is missing.
    """
    common = folder / COMMON_NAME
    installed = version("megatron-core")
    if not common.is_file() and Version(installed) < Version("0.17"):
        raise CheckpointError(
            f"{folder} has no {COMMON_NAME}: megatron-core 0.17 or later wrote it, and {installed} "
            "cannot read it; install megatron-core 0.19 (Python 3.12), or convert the checkpoint "
            "to Hugging Face there"
        )
    try:
        if common.is_file():
            dist_checkpointing.load_common_state_dict(str(folder))
    except UNREADABLE as error:
        reason = one_line(str(error))[:200]
        raise CheckpointError(
            f"{common} cannot be read: {reason}; restore it, or resume from older"
        ) from error

    try:
        loaded: dict[str, Any] = dist_checkpointing.load(
            state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED
        )
    except CheckpointingException as error:
        reason = one_line(str(error))[:300]
        raise CheckpointError(
            f"{folder} does not have what this run needs: {reason}; use another checkpoint"
        ) from error
    return loaded
