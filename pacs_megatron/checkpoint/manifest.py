"""manifest.json: what a checkpoint folder is and which files it must have. Written last, so it marks a whole checkpoint.

A checkpoint folder: `manifest.json`, `dist/` (Megatron's torch_dist format), `hf/` (config.json and tokenizer, what an
export needs besides the weights). Others may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pacs_megatron.checkpoint.names import MANIFEST_NAME
from pacs_megatron.checkpoint.staging import write_file
from pacs_megatron.errors import CheckpointError

DIST_FOLDER = "dist"
HF_FOLDER = "hf"
FORMAT = 1
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes, and the xxh3-128 digest where one was taken."""

    nbytes: int
    xxh3_128: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`step` is the training step, None for a conversion. `files` maps paths relative to the folder to their facts."""

    step: int | None
    files: Mapping[str, FileFacts]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes and flushes manifest.json."""
    files = {name: {"bytes": f.nbytes, "xxh3_128": f.xxh3_128} for name, f in sorted(manifest.files.items())}
    content = {"format": FORMAT, "step": manifest.step, "files": files}
    write_file(folder / MANIFEST_NAME, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError where it is missing, damaged or of another version."""
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        number = content["format"]
        files = {name: FileFacts(f["bytes"], f["xxh3_128"]) for name, f in content["files"].items()}
        manifest = Manifest(step=content["step"], files=files)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {folder} is no checkpoint, or was not written to its end") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); use another checkpoint") from None
    if number != FORMAT:
        raise CheckpointError(f"{path} has format {number}, this release reads {FORMAT}; use the release that wrote it")
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
