"""manifest.json: what a checkpoint folder is and which files it must have. Written last, so it marks a whole checkpoint.

A checkpoint folder: `manifest.json`, `dist/` (Megatron's torch_dist format), `hf/` (config.json and tokenizer, what an
export needs besides the weights). Others may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import xxhash

from pacs_megatron.checkpoint.staging import write_file
from pacs_megatron.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
DIST_FOLDER = "dist"
HF_FOLDER = "hf"
_VERSION = 1
_BLOCK_BYTES = 8 << 20

Kind = Literal["converted", "training"]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes, and the xxh3-128 digest where one was taken."""

    nbytes: int
    xxh3_128: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`step` is the training step, None for a conversion. `files` maps paths relative to the folder."""

    kind: Kind
    step: int | None
    files: Mapping[str, FileFacts]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes and flushes manifest.json."""
    content = {"version": _VERSION, "kind": manifest.kind, "step": manifest.step}
    files = {name: asdict(facts) for name, facts in sorted(manifest.files.items())}
    write_file(folder / MANIFEST_NAME, (json.dumps(content | {"files": files}, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError where it is missing, damaged or of another version."""
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["version"]
        files = {name: FileFacts(f["nbytes"], f["xxh3_128"]) for name, f in content["files"].items()}
        manifest = Manifest(kind=content["kind"], step=content["step"], files=files)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {folder} is no checkpoint, or was not written to its end") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); use another checkpoint") from None
    if version != _VERSION:
        raise CheckpointError(f"{path} has version {version}, this program reads {_VERSION}; use a matching release")
    return manifest


def digest_file(path: Path) -> FileFacts:
    """Reads the whole file."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileFacts(size, digest.hexdigest())


def digest_folder(folder: Path) -> dict[str, FileFacts]:
    """Of every file below `folder`, by relative path; hidden lock files are left out, `.metadata` is not."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in (MANIFEST_NAME, ".writing")]
    return {str(p.relative_to(folder)): digest_file(p) for p in files}


def check_files(folder: Path, manifest: Manifest, *, digests: bool) -> None:
    """Raises CheckpointError naming the first file that is missing, of another size, or (with `digests`) altered."""
    for name, facts in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the checkpoint is not whole, use another copy")
        size = path.stat().st_size
        if size != facts.nbytes:
            raise CheckpointError(f"{path} is {size} bytes, expected {facts.nbytes}: truncated or altered")
        if digests and facts.xxh3_128 is not None and digest_file(path).xxh3_128 != facts.xxh3_128:
            raise CheckpointError(f"{path} was altered since it was written (xxh3-128 differs); use another copy")
