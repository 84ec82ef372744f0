"""Writes and reads training checkpoints.

Writes to a `.partial` folder, adds a manifest with digests, then renames it.

`checkpoints/step_000010/`: `dist/` (Megatron's torch_dist: weights, optimizer, reference),
`state.json` (counters, data position), `rng/` (one file a rank), `hf/` (config and tokenizer, for
the export), `critic/` (with a critic: its `dist/`, `hf/` and manifest, as in a converted
checkpoint), `buffer.*` (samples of steps that are not trained yet, if any), `open_step.*` (only
inside a step: updates done, their metrics, log-probs of the step), `manifest.json` (run, position,
size and xxh3-128 of every file). A folder without manifest is not a checkpoint.
"""

import contextlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial as partial_call
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from pacs_megatron.checkpoint.dist_files import Copy, load_sharded, prepare_sharded
from pacs_megatron.checkpoint.hf_folder import copy_hf_metadata
from pacs_megatron.checkpoint.manifest import (
    DIST_FOLDER,
    HF_FOLDER,
    FileFacts,
    Manifest,
    check_checkpoint,
    check_identity,
    digest_file,
    read_manifest,
    write_manifest,
)
from pacs_megatron.checkpoint.names import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    RUN_IDENTITY_FILE,
    Position,
    describe_newest,
    position_of,
    read_run_identity,
    whole_checkpoints,
)
from pacs_megatron.errors import CheckpointError, shown
from pacs_megatron.parallel.control import ControlChannel
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import gather_json
from pacs_megatron.runtime.files import disk_error, is_file, remove, sync_path, write_atomically
from pacs_megatron.runtime.json_reader import as_object, parse_json, read_object, read_text

logger = logging.getLogger(__name__)
T = TypeVar("T")
CRITIC_DIST = f"critic/{DIST_FOLDER}"
_PARTIAL = ".partial"
_BUFFER = "buffer"
_OPEN_STEP = "open_step"
_RESTORE = "restore it, or remove it to resume from what is older"
Record = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]
"""Plain JSON values and flat arrays, stored as `<name>.json` and `<name>.safetensors`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The content of a checkpoint."""

    sharded: Mapping[str, dict[str, Any]]
    """folder (DIST_FOLDER, CRITIC_DIST) -> weights, optimizer and reference, for dist_checkpointing
    """
    state: Mapping[str, Any]
    """counters and data position: plain JSON values"""
    rng: Mapping[str, torch.Tensor]
    """state of this rank's generators"""
    hf_metadata: Path
    """folder with config and tokenizer"""
    dtype: torch.dtype
    """dtype of the weights"""
    buffer: Record | None
    """on rank 0: finished samples of later steps; None if there are none"""
    open_step: Record | None = None
    """on rank 0: state of a step in progress; None at a step boundary"""


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    whole = whole_checkpoints(run_dir)
    return whole[-1][1] if whole else None


def finish_interrupted(run_dir: Path) -> None:
    """Renames a complete checkpoint whose writer was killed between the last write and the rename.

    Raises CheckpointError if a checkpoint is not a folder.
    """
    folder = run_dir / CHECKPOINTS_FOLDER
    for path in folder.glob("step_*"):
        if position_of(path.name) and not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; {_RESTORE}")
    for partial in folder.glob(f"step_*{_PARTIAL}"):
        final = partial.with_name(partial.name.removesuffix(_PARTIAL))
        try:
            check_identity(final, read_manifest(partial))
        except CheckpointError:
            # Not complete, or a copy of another step: the next save of this step removes it.
            continue
        _replace(final, partial)
        logger.info("%s was complete; renamed", partial)


def _replace(final: Path, partial: Path) -> None:
    """Renames `partial`, which has its manifest.

    After a kill at any point `final` or `partial` is complete.
    """
    if final.exists():
        _remove(final)
    os.rename(partial, final)
    sync_path(final.parent)


def _remove(folder: Path) -> None:
    if not folder.is_symlink():  # the checkpoint behind a link stays
        # Without its manifest it is no checkpoint, even if the removal is interrupted.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
    remove(folder)


def start_checkpoint(
    run_dir: Path,
    position: Position,
    rank: Rank,
    contents: Contents,
    *,
    keep_last: int,
    copy: Copy = lambda data: data,
) -> Callable[[Rank], Path]:
    """Writes the small files and copies the tensors (`copy` of `prepare_sharded`); the returned
    function writes the rest.

    Both are collective over `control` of their rank. They raise CheckpointError on all ranks if a
    rank cannot write; older checkpoints stay complete. An interrupted save leaves a `.partial`
    folder, which the next save removes.
    """
    final = run_dir / CHECKPOINTS_FOLDER / position.name
    partial = final.with_name(final.name + _PARTIAL)

    def prepare() -> None:
        for leftover in final.parent.glob(f"step_*{_PARTIAL}"):
            remove(leftover)
        for name in (*contents.sharded, "rng"):
            (partial / name).mkdir(parents=True)
        for folder in contents.sharded:
            metadata = (partial / folder).with_name(HF_FOLDER)
            metadata.mkdir()
            copy_hf_metadata(
                contents.hf_metadata,
                metadata,
                dtypes={contents.dtype},
                is_critic=folder == CRITIC_DIST,
            )
        state = json.dumps({"step": position.step, **contents.state}, indent=1)
        write_atomically(partial / "state.json", [state.encode()])
        for name, record in ((_BUFFER, contents.buffer), (_OPEN_STEP, contents.open_step)):
            if record is not None:
                _write_record(partial, name, record)

    def finish(rank: Rank) -> Path:
        def complete() -> None:
            manifest = Manifest(
                run=_run_identity(run_dir),
                step=position.step,
                updates=position.updates,
                files=files,
            )
            critic = {
                name.removeprefix("critic/"): own
                for name, own in files.items()
                if name.startswith("critic/")
            }
            if critic:
                write_manifest(partial / "critic", replace(manifest, files=critic))
            write_manifest(partial, manifest)
            _replace(final, partial)
            _prune(run_dir, keep_last)

        with _writing(final, partial, rank) as writing:
            for folder, prepared in tensors.items():
                writing(partial_call(prepared.write, partial / folder, rank.control))
            files = _digest_all(partial, rank)
            writing(complete, only=0)
        return final

    with _writing(final, partial, rank) as writing:
        writing(prepare, only=0)
        writing(
            lambda: save_file(
                dict(contents.rng), partial / "rng" / f"rank_{rank.rank:05d}.safetensors"
            )
        )
        tensors = {
            folder: writing(partial_call(prepare_sharded, state, partial / folder, copy))
            for folder, state in contents.sharded.items()
        }
    return finish


@contextlib.contextmanager
def _writing(final: Path, partial: Path, rank: Rank) -> Iterator[Callable[..., Any]]:
    """Runs actions on every rank, or on rank `only`; after an error the unfinished folder is
    removed.
    """
    channel = ControlChannel(rank)

    def run(action: Callable[[], object], *, only: int | None = None) -> Any:
        return channel.run_together(lambda: _named(final, action), only=only)

    try:
        yield run
    except CheckpointError:
        if rank.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # its space is needed
        raise


def _named(final: Path, action: Callable[[], object]) -> object:
    """Runs `action`.

    Errors of the file system become CheckpointError, also where torch or safetensors wrap them.
    """
    try:
        return action()
    except (OSError, SafetensorError, CheckpointException, RuntimeError) as error:
        cause = (
            next(iter(error.failures.values()))[0]
            if isinstance(error, CheckpointException)
            else error
        )
        # torch's C++ writer does not report the reason
        found = cause if isinstance(cause, OSError) else disk_error(final.parent)
        if found is None and isinstance(cause, RuntimeError):
            raise  # not of the disk
        reason = str(cause) if found is None else found.strerror
        raise CheckpointError(
            f"{final} was not saved ({reason}); free some space or correct the permissions, then "
            "resume: "
            f"{describe_newest(final.parent.parent)}"
        ) from error


def _write_record(folder: Path, name: str, record: Record) -> None:
    header, arrays = record
    write_atomically(folder / f"{name}.json", [json.dumps(header).encode()])
    save_arrays(
        {key: np.ascontiguousarray(array) for key, array in arrays.items()},
        folder / f"{name}.safetensors",
    )


def read_record(
    folder: Path, name: str = _BUFFER
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """A record, `Contents.buffer` unless another is named, as saved; None if there is none."""
    path = folder / f"{name}.json"
    if not is_file(path, CheckpointError):
        return None
    text = read_text(path, error=CheckpointError)
    header = as_object(parse_json(text, str(path), error=CheckpointError, any_text=True), str(path))
    return header, _load(load_arrays, folder / f"{name}.safetensors")


def read_open_step(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """`Contents.open_step` as saved. Raises CheckpointError for the format of an earlier release."""
    if (folder / "begun.json").is_file():
        raise CheckpointError(
            f"{folder} was saved inside a step by an earlier release, which this release does not "
            "read; resume it with that release, or remove the folder to repeat the step"
        )
    return read_record(folder, _OPEN_STEP)


def _prune(run_dir: Path, keep_last: int) -> None:
    """Keeps the newest `keep_last` checkpoints at step boundaries, and one inside a step if it is
    the newest of all.
    """
    whole = whole_checkpoints(run_dir)
    between = [path for position, path in whole if not position.updates]
    kept = {*between[-keep_last:], whole[-1][1]}
    for _, path in whole:
        if path not in kept:
            _remove(path)


def _run_identity(run_dir: Path) -> str:
    """The run's identity, created at its first save.

    A run that resumes a copied checkpoint keeps its identity.
    """
    identity = read_run_identity(run_dir)
    if identity is None:
        newest = latest_checkpoint(run_dir)
        identity = (None if newest is None else read_manifest(newest).run) or uuid.uuid4().hex
        write_atomically(run_dir / RUN_IDENTITY_FILE, [f"{identity}\n".encode()])
    return identity


def _digest_all(folder: Path, rank: Rank) -> dict[str, FileFacts]:
    """Size and digest of every file, on rank 0; each rank digests a share of them. Collective."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    own = {
        name: asdict(digest_file(folder / name))
        for name in names[rank.rank :: rank.layout.world_size]
    }
    shares = gather_json(own, group=rank.control) or []
    return {name: FileFacts(**facts) for share in shares for name, facts in share.items()}


def verify_checkpoint(folder: Path, channel: ControlChannel) -> None:
    """Checks identity, and size and digest of every file.

    Collective; raises CheckpointError on every rank.
    """
    share = slice(channel.rank.rank, None, channel.rank.layout.world_size)

    def check() -> None:
        try:
            check_checkpoint(folder, share=share)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; or remove {folder} to resume from an older one"
            ) from None

    channel.run_together(check)


_STATE: Mapping[str, Any] = {
    "policy_version": int,
    "driver": dict,
    "row": (dict, NoneType),
    "has_reference": bool,
}
"""Key of state.json -> type"""


def read_state(folder: Path) -> dict[str, Any]:
    """Counters and data position.

    Raises CheckpointError if one is malformed or the step is not the folder's.
    """
    file = folder / "state.json"
    state = read_object(file, error=CheckpointError)
    position = position_of(folder.name)
    if position is None or state.get("step") != position.step:
        raise CheckpointError(
            f"{file}: step is {shown(state.get('step'))}, but the folder is {folder.name}; "
            f"{_RESTORE}"
        )
    for name, kind in _STATE.items():
        if not isinstance(state.get(name), kind) or (kind is int and not 0 <= state[name] < 2**63):
            raise CheckpointError(f"{file}: {name} is {shown(state.get(name))}; {_RESTORE}")
    return state


def load_checkpoint(
    folder: Path, rank: Rank, sharded: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor] | None]:
    """The filled state dicts, and this rank's generators (None if the number of ranks has changed).

    Collective.
    """
    filled = {name: load_sharded(state, folder / name) for name, state in sharded.items()}
    own = folder / "rng" / f"rank_{rank.rank:05d}.safetensors"
    saved = len(list((folder / "rng").glob("*.safetensors")))
    if saved != rank.layout.world_size:
        if rank.rank == 0:
            logger.info(
                "checkpoint of %d ranks, now %d: torch's generators start from the seed",
                saved,
                rank.layout.world_size,
            )
        return filled, None
    return filled, _load(load_file, own)


def _load(load: Callable[[Path], dict[str, T]], file: Path) -> dict[str, T]:
    """Loads a file; converts errors of safetensors to CheckpointError, because a manifest can match
    a damaged file.
    """
    try:
        return load(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is malformed ({error}); {_RESTORE}") from error
