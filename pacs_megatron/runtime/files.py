"""Small files of a run folder: written beside and renamed, and JSON lines that survive a kill at any moment."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pacs_megatron.errors import DataError

PARTIAL_SUFFIX = ".partial"
"""A file with this suffix was being written when its process died; it is never read."""


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """`path` holds either its old content or all of `chunks`, whatever happens; parents are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + PARTIAL_SUFFIX)
    with beside.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_line(record: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline; equal records give equal bytes (floats by repr, keys in the record's order).

    A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape. NaN and Inf raise ValueError.
    """
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def complete_lines(path: Path) -> list[bytes]:
    """The lines that end in a newline, without it; a torn last line is left out. [] when there is no file."""
    if not path.exists():
        return []
    # The piece after the last newline is empty in a healthy file, and torn after a kill.
    return path.read_bytes().split(b"\n")[:-1]


def parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of `lines`. Raises DataError with the line's number when one is none."""
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error}); restore the line or delete it") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}; delete the line")
        yield record
