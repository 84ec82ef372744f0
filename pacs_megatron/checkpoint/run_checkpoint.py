"""A training checkpoint on disk: written beside, digested in a manifest, renamed; the newest ones are kept.

`checkpoints/step_000010/`: `dist/` (Megatron's torch_dist: weights, optimizer, reference), `state.json` (counters, data
position), `rng/` (one file a rank), `hf/` (config and tokenizer, for the export), `buffer.safetensors` and `buffer.json`
(samples of steps that are not trained yet; only where there are some), `begun.safetensors` and `begun.json` (only where a
step is in the middle of its updates), `manifest.json` (size and xxh3-128 of every file). A folder without manifest is
not a checkpoint.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pacs_megatron.checkpoint.dist_files import load_sharded, save_sharded
from pacs_megatron.checkpoint.hf_folder import copy_hf_metadata
from pacs_megatron.checkpoint.manifest import (
    DIST_FOLDER,
    HF_FOLDER,
    FileFacts,
    Manifest,
    check_files,
    digest_file,
    read_manifest,
    write_manifest,
)
from pacs_megatron.checkpoint.names import CHECKPOINTS_FOLDER, MANIFEST_NAME, Position, whole_checkpoints
from pacs_megatron.errors import CheckpointError
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_arrays, gather_arrays
from pacs_megatron.runtime.files import sync_folder, write_atomically

logger = logging.getLogger(__name__)
_PARTIAL = ".partial"
_BUFFER, _OPEN_STEP = "buffer", "open_step"
Record = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]
"""Plain JSON values and flat arrays: `<name>.json` and `<name>.safetensors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds."""

    sharded: dict[str, Any]
    """weights, optimizer and reference, for dist_checkpointing"""
    state: Mapping[str, Any]
    """counters and data position: plain JSON values"""
    rng: Mapping[str, torch.Tensor]
    """this rank's generators"""
    hf_metadata: Path
    """folder with config and tokenizer"""
    dtype: torch.dtype
    """of the weights"""
    buffer: Record | None
    """on rank 0: finished samples of later steps; None: there are none"""
    open_step: Record | None = None
    """on rank 0: state of a step of which some updates are done; None at a step boundary"""


def checkpoint_folder(run_dir: Path, position: Position) -> Path:
    """Where the checkpoint of `position` lives."""
    return run_dir / CHECKPOINTS_FOLDER / position.name


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint that is whole, or None."""
    whole = whole_checkpoints(run_dir)
    return whole[-1][1] if whole else None


def finish_interrupted(run_dir: Path) -> None:
    """Gives a checkpoint its name whose writer was killed after the last byte and before the renaming."""
    for partial in (run_dir / "checkpoints").glob(f"step_*{_PARTIAL}"):
        try:
            read_manifest(partial)
        except CheckpointError:
            continue  # not whole: the next save removes it
        _replace(partial.with_name(partial.name.removesuffix(_PARTIAL)), partial)
        logger.info("%s was whole but for its name", partial)


def _replace(final: Path, partial: Path) -> None:
    """Renames `partial`, which has its manifest. Killed at any point, `final` or `partial` is whole afterwards."""
    if final.exists():
        _remove(final)
    os.rename(partial, final)
    sync_folder(final.parent)


def _remove(folder: Path) -> None:
    # Without its manifest it is no checkpoint any more, even if the removal is interrupted.
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)


def save_checkpoint(run_dir: Path, position: Position, rank: Rank, contents: Contents, *, keep_last: int) -> Path:
    """Write a whole checkpoint. Collective. An interrupted one leaves only a `.partial` folder, removed next time."""
    from safetensors.torch import save_file

    final = checkpoint_folder(run_dir, position)
    partial = final.with_name(final.name + _PARTIAL)
    if rank.rank == 0:
        for leftover in final.parent.glob(f"*{_PARTIAL}"):
            shutil.rmtree(leftover)
        for name in (DIST_FOLDER, HF_FOLDER, "rng"):
            (partial / name).mkdir(parents=True)
        copy_hf_metadata(contents.hf_metadata, partial / HF_FOLDER, dtypes={contents.dtype})
        state = json.dumps({"step": position.step, **contents.state}, indent=1)
        write_atomically(partial / "state.json", [state.encode()])
        for name, record in ((_BUFFER, contents.buffer), (_OPEN_STEP, contents.open_step)):
            if record is not None:
                _write_record(partial, name, record)
    dist.barrier(group=rank.control)
    save_file(dict(contents.rng), partial / "rng" / f"rank_{rank.rank:05d}.safetensors")
    save_sharded(contents.sharded, partial / DIST_FOLDER)
    dist.barrier(group=rank.control)
    files = _digest_all(partial, rank)
    if rank.rank == 0:
        write_manifest(partial, Manifest(step=position.step, files=files))
        _replace(final, partial)
        _prune(run_dir, keep_last)
    dist.barrier(group=rank.control)
    return final


def _write_record(folder: Path, name: str, record: Record) -> None:
    from safetensors.numpy import save_file

    header, arrays = record
    write_atomically(folder / f"{name}.json", [json.dumps(header).encode()])
    save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, folder / f"{name}.safetensors")


def _read_record(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    from safetensors.numpy import load_file

    if not (folder / f"{name}.json").is_file():
        return None
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


def read_buffer(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What `Contents.buffer` was; None when the checkpoint has none."""
    return _read_record(folder, _BUFFER)


def read_open_step(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """`Contents.open_step` as saved. Raises CheckpointError for the format of an earlier release."""
    if (folder / "begun.json").is_file():
        raise CheckpointError(
            f"{folder} was saved inside a step by an earlier release, which this release does not read; resume it with that "
            "release, or remove the folder to repeat the step"
        )
    return _read_record(folder, _OPEN_STEP)


def _prune(run_dir: Path, keep_last: int) -> None:
    """Keeps the newest `keep_last` between two steps; one in the middle of a step only while it is the newest of all."""
    whole = whole_checkpoints(run_dir)
    between = [path for position, path in whole if not position.updates]
    kept = {*between[-keep_last:], whole[-1][1]}
    for _, path in whole:
        if path not in kept:
            _remove(path)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _digest_all(folder: Path, rank: Rank) -> dict[str, FileFacts]:
    """Size and digest of every file; the files are dealt over the ranks. Filled on rank 0. Collective."""
    mine = {name: asdict(digest_file(folder / name)) for name in _files(folder)[rank.rank :: rank.layout.world_size]}
    wire = {"json": np.frombuffer(json.dumps(mine).encode(), dtype=np.uint8)}
    gathered = gather_arrays(wire, group=rank.control)
    merged: dict[str, FileFacts] = {}
    for part in gathered or []:
        merged |= {name: FileFacts(**facts) for name, facts in json.loads(part["json"].tobytes()).items()}
    return dict(sorted(merged.items()))


def verify_checkpoint(folder: Path, rank: Rank) -> None:
    """Every file is there with its size and digest. Collective; raises CheckpointError on every rank."""
    manifest = read_manifest(folder)
    mine = dict(sorted(manifest.files.items())[rank.rank :: rank.layout.world_size])
    problem = ""
    try:
        check_files(folder, Manifest(step=manifest.step, files=mine), digests=True)
    except CheckpointError as error:
        problem = str(error)
    gathered = gather_arrays({"p": np.frombuffer(problem.encode(), dtype=np.uint8)}, group=rank.control)
    text = next((t for g in gathered or [] if (t := g["p"].tobytes().decode())), "")
    answer = broadcast_arrays({"p": np.frombuffer(text.encode(), dtype=np.uint8)}, src=0, group=rank.control)
    text = answer["p"].tobytes().decode()
    if text:
        raise CheckpointError(f"{text}; or remove {folder} to resume from an older one")


def read_state(folder: Path) -> dict[str, Any]:
    """Counters and data position."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def load_checkpoint(
    folder: Path, rank: Rank, sharded: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """(filled state dict, this rank's generators or None when another number of ranks saved). Collective."""
    from safetensors.torch import load_file

    filled = load_sharded(sharded, folder / DIST_FOLDER)
    own = folder / "rng" / f"rank_{rank.rank:05d}.safetensors"
    saved = len(list((folder / "rng").glob("*.safetensors")))
    if saved != rank.layout.world_size:
        if rank.rank == 0:
            logger.info(
                "checkpoint of %d ranks, now %d: torch's generators start from the seed", saved, rank.layout.world_size
            )
        return filled, None
    return filled, load_file(own)
