"""Writes and reads training checkpoints.

Writes to a `.partial` folder, adds a manifest with digests, then renames it.

Files of `checkpoints/step_000010/`:

    dist/           weights, optimizer and reference, Megatron's torch_dist format
    state.json      counters, position in the data
    rng/            generators, one file a rank
    hf/             config and tokenizer, for the export
    lora.json       with adapters: what they are, and the digest of the frozen weights
    critic/         with a critic: its dist/, hf/ and manifest, same as in a converted checkpoint
    buffer.*        samples of steps that are not trained yet, if any
    open_step.*     only inside a step: updates done, their metrics, log-probs of the step
    manifest.json   run, position, size and xxh3-128 of every file

A folder without manifest is not a checkpoint.
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

from pacs_megatron.checkpoint.adapters import LoraFacts
from pacs_megatron.checkpoint.beside import Beside
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
    lora: LoraFacts | None = None
    """of the adapters, if these are trained"""
    stop_token_ids: tuple[int, ...] = ()
    """tokens that end a response, for generation_config.json"""
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


# --------------------------------------------------------------------------------------------------
# Writing


def start_checkpoint(
    run_dir: Path,
    position: Position,
    rank: Rank,
    contents: Contents,
    *,
    keep_last: int,
    copy: Copy = lambda data: data,
) -> Callable[[Rank], Path]:
    """Writes the small files and copies the tensors.

    It and the returned function are collective over `control` of their rank, and raise
    CheckpointError on all ranks if a rank cannot write; older checkpoints stay complete. An
    interrupted save leaves a `.partial` folder, which the next save removes.

    Args:
        run_dir: the run's folder.
        position: of the run.
        rank: this rank.
        contents: of the checkpoint.
        keep_last: number of checkpoints at step boundaries that are kept.
        copy: see `prepare_sharded`.

    Returns:
        A function that writes the rest and returns the folder. A thread may call it, with a rank
        whose control group is the thread's.
    """
    final = run_dir / CHECKPOINTS_FOLDER / position.name
    partial = final.with_name(final.name + _PARTIAL)

    def finish(rank: Rank) -> Path:
        with _writing(final, partial, rank) as write:
            for folder, prepared in tensors.items():
                write(partial_call(prepared.write, partial / folder, rank.control))
            files = _digest_all(partial, rank)

            def complete() -> None:
                _write_manifests(partial, run_dir, position, files)
                _replace(final, partial)
                _prune(run_dir, keep_last)

            write(complete, only=0)
        return final

    with _writing(final, partial, rank) as write:
        write(lambda: _write_small_files(partial, position, contents), only=0)
        rng_file = partial / "rng" / f"rank_{rank.rank:05d}.safetensors"
        write(lambda: save_file(dict(contents.rng), rng_file))
        tensors = {
            folder: write(partial_call(prepare_sharded, state, partial / folder, copy))
            for folder, state in contents.sharded.items()
        }
    return finish


@contextlib.contextmanager
def _writing(final: Path, partial: Path, rank: Rank) -> Iterator[Callable[..., Any]]:
    """Yields a function that runs an action on every rank, or on rank `only`. Collective.

    After an error the unfinished folder is removed.
    """
    channel = ControlChannel(rank)

    def run(action: Callable[[], object], *, only: int | None = None) -> Any:
        return channel.run_together(lambda: _with_disk_errors(final, action), only=only)

    try:
        yield run
    except CheckpointError:
        if rank.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # its space is needed
        raise


def _with_disk_errors(final: Path, action: Callable[[], object]) -> object:
    """Runs `action`.

    Errors of the file system become CheckpointError, also where torch or safetensors wrap them.
    """
    try:
        return action()
    except (OSError, SafetensorError, CheckpointException, RuntimeError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            first_failure = next(iter(error.failures.values()))
            cause = first_failure[0]
        # torch's C++ writer does not report the reason, which the disk shows.
        os_error = cause if isinstance(cause, OSError) else disk_error(final.parent)
        if os_error is None and isinstance(cause, RuntimeError):
            raise  # not of the disk
        reason = str(cause) if os_error is None else os_error.strerror
        raise CheckpointError(
            f"{final} was not saved ({reason}); free some space or correct the permissions, then "
            f"resume: {describe_newest(final.parent.parent)}"
        ) from error


def _write_small_files(partial: Path, position: Position, contents: Contents) -> None:
    """Creates the folder with everything except tensors, generators and manifest; on rank 0."""
    for leftover in partial.parent.glob(f"step_*{_PARTIAL}"):
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
            stop_token_ids=contents.stop_token_ids,
        )
    Beside(contents.hf_metadata).write(partial / HF_FOLDER)

    if contents.lora is not None:
        contents.lora.write(partial)
    state = json.dumps({"step": position.step, **contents.state}, indent=1)
    write_atomically(partial / "state.json", [state.encode()])
    if contents.buffer is not None:
        _write_record(partial, _BUFFER, contents.buffer)
    if contents.open_step is not None:
        _write_record(partial, _OPEN_STEP, contents.open_step)


def _write_record(folder: Path, name: str, record: Record) -> None:
    header, arrays = record
    write_atomically(folder / f"{name}.json", [json.dumps(header).encode()])
    contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    save_arrays(contiguous, folder / f"{name}.safetensors")


def _digest_all(folder: Path, rank: Rank) -> dict[str, FileFacts]:
    """Size and digest of every file, on rank 0; each rank digests a share of them. Collective."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    share = names[rank.rank :: rank.layout.world_size]
    digests = {name: asdict(digest_file(folder / name)) for name in share}
    files: dict[str, FileFacts] = {}
    for shared in gather_json(digests, group=rank.control) or []:
        for name, facts in shared.items():
            files[name] = FileFacts(**facts)
    return files


def _write_manifests(
    partial: Path, run_dir: Path, position: Position, files: dict[str, FileFacts]
) -> None:
    """Writes the critic's manifest, then the checkpoint's, which completes it."""
    manifest = Manifest(
        run=_run_identity(run_dir),
        step=position.step,
        updates=position.updates,
        files=files,
    )
    critic_files = {
        name.removeprefix("critic/"): facts
        for name, facts in files.items()
        if name.startswith("critic/")
    }
    if critic_files:
        write_manifest(partial / "critic", replace(manifest, files=critic_files))
    write_manifest(partial, manifest)


def _run_identity(run_dir: Path) -> str:
    """The run's identity, created at its first save.

    A run that resumes a copied checkpoint keeps its identity.
    """
    identity = read_run_identity(run_dir)
    if identity is not None:
        return identity
    newest = latest_checkpoint(run_dir)
    if newest is not None:
        identity = read_manifest(newest).run
    identity = identity or uuid.uuid4().hex
    write_atomically(run_dir / RUN_IDENTITY_FILE, [f"{identity}\n".encode()])
    return identity


def _replace(final: Path, partial: Path) -> None:
    """Renames `partial`, which has its manifest.

    After a kill at any point `final` or `partial` is complete.
    """
    if final.exists():
        _remove(final)
    os.rename(partial, final)
    sync_path(final.parent)


def _prune(run_dir: Path, keep_last: int) -> None:
    """Keeps the newest `keep_last` checkpoints at step boundaries, and one inside a step if it is
    the newest of all.
    """
    whole = whole_checkpoints(run_dir)
    boundaries = [path for position, path in whole if not position.updates]
    newest = whole[-1][1]
    to_keep = {*boundaries[-keep_last:], newest}
    for _, path in whole:
        if path not in to_keep:
            _remove(path)


def _remove(folder: Path) -> None:
    if not folder.is_symlink():  # the checkpoint behind a link stays
        # Without its manifest it is not a checkpoint, even if the removal is interrupted.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
    remove(folder)


# --------------------------------------------------------------------------------------------------
# Reading


def verify_checkpoint(
    folder: Path, channel: ControlChannel, *, is_of_this_run: bool = True
) -> None:
    """Checks identity, and size and digest of every file. Collective.

    Args:
        folder: the checkpoint.
        channel: of all ranks.
        is_of_this_run: whether the message advises to resume from an older one.

    Raises:
        CheckpointError: on every rank.
    """
    advice = f"; or remove {folder} to resume from an older one" if is_of_this_run else ""
    share = slice(channel.rank.rank, None, channel.rank.layout.world_size)

    def check() -> None:
        try:
            check_checkpoint(folder, share=share)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{advice}") from None

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
        value = state.get(name)
        is_valid = isinstance(value, kind)
        if is_valid and kind is int:
            is_valid = 0 <= state[name] < 2**63
        if not is_valid:
            raise CheckpointError(f"{file}: {name} is {shown(value)}; {_RESTORE}")
    return state


def read_record(
    folder: Path, name: str = _BUFFER
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """A record, `Contents.buffer` unless another is named, as saved; None if there is none."""
    path = folder / f"{name}.json"
    if not is_file(path, CheckpointError):
        return None
    text = read_text(path, error=CheckpointError)
    value = parse_json(text, str(path), error=CheckpointError, any_text=True)
    header = as_object(value, str(path))
    return header, _load(load_arrays, folder / f"{name}.safetensors")


def read_open_step(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """`Contents.open_step` as saved; None if there is none.

    Raises CheckpointError for the format of an earlier release.
    """
    if (folder / "begun.json").is_file():
        raise CheckpointError(
            f"{folder} was saved inside a step by an earlier release, which this release does not "
            "read; resume it with that release, or remove the folder to repeat the step"
        )
    return read_record(folder, _OPEN_STEP)


def load_checkpoint(
    folder: Path, rank: Rank, sharded: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor] | None]:
    """Reads the tensors of a checkpoint. Collective.

    Args:
        folder: the checkpoint.
        rank: this rank.
        sharded: folder (DIST_FOLDER, CRITIC_DIST) -> the state dict to fill.

    Returns:
        The filled state dicts, by folder.
        The state of this rank's generators; None if the number of ranks has changed.

    Raises:
        CheckpointError: if a file is malformed or lacks a part.
    """
    filled = {name: load_sharded(state, folder / name) for name, state in sharded.items()}
    rng_folder = folder / "rng"
    num_saved = len(list(rng_folder.glob("*.safetensors")))
    if num_saved != rank.layout.world_size:
        if rank.rank == 0:
            logger.info(
                "checkpoint of %d ranks, now %d: torch's generators start from the seed",
                num_saved,
                rank.layout.world_size,
            )
        return filled, None
    return filled, _load(load_file, rng_folder / f"rank_{rank.rank:05d}.safetensors")


def _load(load: Callable[[Path], dict[str, T]], file: Path) -> dict[str, T]:
    """Loads a file; converts errors of safetensors to CheckpointError, because a manifest can match
    a damaged file.
    """
    try:
        return load(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is malformed ({error}); {_RESTORE}") from error
