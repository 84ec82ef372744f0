"""A training checkpoint on disk: written beside, digested in a manifest, renamed; the newest ones are kept.

`checkpoints/step_000010/`: `dist/` (Megatron's torch_dist: weights, optimizer, reference), `state.json` (counters, data
position), `rng/` (one file a rank), `hf/` (config and tokenizer, for the export), `manifest.json` (size and xxh3-128 of
every file). A folder without manifest is not a checkpoint.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from pacs_megatron.checkpoint.dist_files import load_sharded, save_sharded
from pacs_megatron.checkpoint.hf_folder import copy_hf_metadata
from pacs_megatron.errors import CheckpointError
from pacs_megatron.observability.files import sync_folder, write_atomically
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_arrays, gather_arrays

logger = logging.getLogger(__name__)
FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{6,})")
_BLOCK = 1 << 24


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step that is whole, or None."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("step_*")
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return max(found)[1] if found else None


def save_checkpoint(
    run_dir: Path,
    step: int,
    rank: Rank,
    *,
    sharded: dict[str, Any],
    state: Mapping[str, Any],
    rng: Mapping[str, torch.Tensor],
    hf_metadata: Path,
    dtype: torch.dtype,
    keep_last: int,
) -> Path:
    """Write a whole checkpoint. Collective. An interrupted one leaves only a `.partial` folder, removed next time."""
    from safetensors.torch import save_file

    final = checkpoint_folder(run_dir, step)
    partial = final.with_name(final.name + ".partial")
    if rank.rank == 0:
        for leftover in final.parent.glob("*.partial"):
            shutil.rmtree(leftover)
        for name in ("dist", "rng"):
            (partial / name).mkdir(parents=True)
        (partial / "hf").mkdir()
        copy_hf_metadata(hf_metadata, partial / "hf", dtypes={dtype})
        write_atomically(partial / "state.json", [json.dumps({"step": step, **state}, indent=1).encode()])
    dist.barrier(group=rank.control)
    save_file(dict(rng), partial / "rng" / f"rank_{rank.rank:05d}.safetensors")
    save_sharded(sharded, partial / "dist")
    dist.barrier(group=rank.control)
    entries = _digest_all(partial, rank)
    if rank.rank == 0:
        manifest = {"format": FORMAT, "step": step, "files": entries}
        write_atomically(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        sync_folder(final.parent)
        _prune(final.parent, keep_last)
    dist.barrier(group=rank.control)
    return final


def _prune(folder: Path, keep_last: int) -> None:
    whole = sorted(
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    )
    for _, path in whole[:-keep_last]:
        # Without its manifest it is no checkpoint any more, even if the removal is interrupted.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _digest_all(folder: Path, rank: Rank) -> dict[str, dict[str, Any]]:
    """Size and digest of every file; the files are dealt over the ranks. Filled on rank 0. Collective."""
    mine = {
        name: {"bytes": (folder / name).stat().st_size, "xxh3_128": _digest(folder / name)}
        for name in _files(folder)[rank.rank :: rank.layout.world_size]
    }
    wire = {"json": np.frombuffer(json.dumps(mine).encode(), dtype=np.uint8)}
    gathered = gather_arrays(wire, group=rank.control)
    merged: dict[str, dict[str, Any]] = {}
    for part in gathered or []:
        merged |= json.loads(part["json"].tobytes())
    return dict(sorted(merged.items()))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises CheckpointError when it is missing, malformed or of another format."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        format_number = manifest["format"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable manifest ({error}); remove {folder} to use an older one") from error
    if format_number != FORMAT:
        raise CheckpointError(f"{path}: format {format_number}, this version reads {FORMAT}; use the version that wrote it")
    return manifest


def verify_checkpoint(folder: Path, rank: Rank) -> None:
    """Every file is there with its size and digest. Collective; raises CheckpointError on every rank."""
    manifest = read_manifest(folder)
    problem = ""
    for name in sorted(manifest["files"])[rank.rank :: rank.layout.world_size]:
        entry = manifest["files"][name]
        path = folder / name
        if not path.is_file():
            problem = f"{path} is missing"
        elif path.stat().st_size != entry["bytes"]:
            problem = f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
        elif _digest(path) != entry["xxh3_128"]:
            problem = f"{path} was altered: its digest is not the manifest's"
        if problem:
            break
    gathered = gather_arrays({"p": np.frombuffer(problem.encode(), dtype=np.uint8)}, group=rank.control)
    text = next((t for g in gathered or [] if (t := g["p"].tobytes().decode())), "")
    answer = broadcast_arrays({"p": np.frombuffer(text.encode(), dtype=np.uint8)}, src=0, group=rank.control)
    text = answer["p"].tobytes().decode()
    if text:
        raise CheckpointError(f"{text}; remove {folder} to resume from an older checkpoint, or start a new run")


def read_state(folder: Path) -> dict[str, Any]:
    """Counters and data position."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def load_checkpoint(folder: Path, rank: Rank, sharded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """(filled state dict, this rank's generators or None when another number of ranks saved). Collective."""
    from safetensors.torch import load_file

    filled = load_sharded(sharded, folder / "dist")
    own = folder / "rng" / f"rank_{rank.rank:05d}.safetensors"
    saved = len(list((folder / "rng").glob("*.safetensors")))
    if saved != rank.layout.world_size:
        if rank.rank == 0:
            logger.info("checkpoint of %d ranks, now %d: torch's generators start from the seed", saved, rank.layout.world_size)
        return filled, None
    return filled, load_file(own)
