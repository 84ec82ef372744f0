"""manifest.json: identifies the checkpoint in a folder and lists its files with digests.

It is written last, so it marks a complete checkpoint.

A checkpoint folder: `manifest.json`, `dist/` (Megatron's torch_dist format), `hf/` (config.json and
tokenizer, what an export needs besides the weights). There may be other files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from pacs_megatron.checkpoint.names import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    Position,
    position_of,
    read_run_identity,
)
from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.waiting import report_wait

DIST_FOLDER = "dist"
HF_FOLDER = "hf"
FORMAT = 1


def _relative(name: str) -> str:
    """`name`. Raises ValueError if it leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is outside of the folder")
    return name


Count = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and xxh3-128 digest."""

    nbytes: Annotated[Count, Field(validation_alias="bytes")]
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`files` maps paths relative to the folder to size and digest."""

    step: Count | None
    """training steps; None for a conversion"""
    files: Mapping[Annotated[str, AfterValidator(_relative)], FileFacts]
    updates: Count = 0
    """of the next step"""
    run: str | None = None
    """identity of the run; None for a conversion, and for a run of an earlier release"""


_READER = TypeAdapter(Manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes and flushes manifest.json."""
    files = {
        name: {"bytes": facts.nbytes, "xxh3_128": facts.xxh3_128}
        for name, facts in sorted(manifest.files.items())
    }
    content = {
        "format": FORMAT,
        "run": manifest.run,
        "step": manifest.step,
        "updates": manifest.updates,
        "files": files,
    }
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(folder / MANIFEST_NAME, [text.encode()])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`.

    Raises CheckpointError if it is missing, damaged, of another version, or incomplete.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; {folder} is no checkpoint, or was not written completely"
        )
    content = read_object(path, error=CheckpointError)
    number = content.get("format")
    if number != FORMAT:
        raise CheckpointError(
            f"{path} has format {number}, this release reads {FORMAT}; use the release that wrote "
            "it"
        )
    try:
        manifest = _READER.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        reason = f"{key}: {first['msg']}"
        raise CheckpointError(f"{path} is damaged ({reason}); use another checkpoint") from None

    # A file that is not listed has no digest.
    for file in sorted((folder / DIST_FOLDER).glob("[!.]*")):
        if f"{DIST_FOLDER}/{file.name}" not in manifest.files:
            raise CheckpointError(
                f"{path} does not list {file}; it is damaged, or the file is not part of the "
                "checkpoint"
            )
    return manifest


def check_identity(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless the manifest has the folder's name and the identity of the run
    around it.

    This detects swapped checkpoints, which are complete.
    """
    position = position_of(folder.name)
    if position is not None and manifest.step is not None:
        saved = Position(manifest.step, manifest.updates)
        if saved != position:
            raise CheckpointError(
                f"{folder} contains the checkpoint of {saved}; folders were renamed or swapped, "
                f"restore the name {saved.name}"
            )

    if folder.parent.name != CHECKPOINTS_FOLDER or manifest.run is None:
        return
    run_dir = folder.parent.parent
    identity = read_run_identity(run_dir)
    if identity is not None and identity != manifest.run:
        raise CheckpointError(
            f"{folder} belongs to run {manifest.run}, but {run_dir} is run {identity}; restore the "
            "run's own checkpoint, or start a new run folder from this one"
        )


def check_checkpoint(folder: Path, *, digests: bool = True, share: slice = slice(None)) -> Manifest:
    """The manifest of a complete checkpoint.

    Args:
        folder: the checkpoint.
        digests: whether files are read and compared with their digests, or only their sizes.
        share: slice of the files, in order, that this process checks.

    Raises:
        CheckpointError: for a wrong identity or a missing or altered file.
    """
    manifest = read_manifest(folder)
    check_identity(folder, manifest)
    files = dict(sorted(manifest.files.items())[share])
    num_bytes = sum(facts.nbytes for facts in manifest.files.values())
    with report_wait(f"for the digests of {folder} ({num_bytes / 1e9:.1f} GB)"):
        check_files(folder, replace(manifest, files=files), digests=digests)
    return manifest


def check_files(folder: Path, manifest: Manifest, *, digests: bool) -> None:
    """Raises CheckpointError naming the first file that is missing, of another size, or (with
    `digests`) altered.
    """
    for name, facts in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; the checkpoint is not complete, use another copy"
            )
        size = path.stat().st_size
        if size != facts.nbytes:
            raise CheckpointError(
                f"{path} is {size} bytes, expected {facts.nbytes}: truncated or altered"
            )
        if digests and digest_file(path).xxh3_128 != facts.xxh3_128:
            raise CheckpointError(
                f"{path} was altered since it was written (xxh3-128 differs); use another copy"
            )


def digest_file(path: Path) -> FileFacts:
    """Size and digest of a file, which it reads completely."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileFacts(file.tell(), digest.hexdigest())
