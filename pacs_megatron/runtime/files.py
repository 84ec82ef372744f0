"""Small files of a run folder: atomic writes, and JSON lines that survive a kill at any moment."""

import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from pacs_megatron.errors import ConfigError, DataError, PacsError
from pacs_megatron.runtime.json_reader import as_object, parse_json, read_bytes, read_lines

PARTIAL_SUFFIX = ".partial"
"""Suffix of a file that is not completely written; such a file is never read."""
GIB = 2**30
_KIND = re.compile(
    rb'<!doctype html>.{0,2000}?<title>\w+[:<]|\{\n "direction": "[a-z-]+"|.{0,12}', re.DOTALL
)
"""The start of an output, up to its first name or number, or the checksum of an archive: equal in
all outputs of a kind.
"""


def existing_parent(folder: Path) -> Path:
    """The folder itself, or its nearest existing parent."""
    absolute = folder.absolute()
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError of the block; `write` and `fsync` raise it without one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes `chunks` to `path`, which has its old or its new content, also after a kill.

    Creates parent folders.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with naming(path), partial.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            # Before the rename: a crash of the host could otherwise leave an empty file at `path`.
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def remove(path: Path) -> None:
    """Removes a folder with its content, a file, or a link, whose target stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def disk_error(folder: Path) -> OSError | None:
    """Tries to write a file in `folder`. Returns the error, None if there is none."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".pacs-try-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def is_file(path: Path, error: type[PacsError] = DataError) -> bool:
    """Whether there is a file.

    Raises `error` if `path` exists but is not a regular file: folder, pipe, device, broken link.
    """
    if not path.is_file() and os.path.lexists(path):
        raise error(f"{path}: not a regular file; correct or remove it")
    return path.is_file()


def check_distinct(paths: Iterable[Path]) -> None:
    """Raises ConfigError for a file or folder that is given twice, also through a link."""
    for first, second in itertools.combinations(paths, 2):
        if os.path.realpath(first) == os.path.realpath(second):
            raise ConfigError(f"{second} is given twice; name a file or folder once")


def check_output(path: Path, content: bytes) -> None:
    """Checks that `content` may replace `path`.

    Raises:
        ConfigError: `path` is a folder, a device or a loop of links, or an existing file of another
            kind: one that starts unlike `content`.
    """
    is_link_loop = os.path.islink(os.path.realpath(path))
    if (path.exists() and not path.is_file()) or is_link_loop:
        raise ConfigError(f"{path} is not a regular file; name another file for the output")
    if not path.exists():
        return

    match = _KIND.match(content)
    assert match is not None  # the last branch of the expression matches any start
    kind = match[0]
    with path.open("rb") as file:
        before = file.read(len(kind))
    if before and before != kind:
        raise ConfigError(
            f"{path} exists and is not an earlier output of this command; name another file"
        )


def write_outputs(files: Sequence[tuple[Path, bytes]]) -> None:
    """Writes the output files that the user named.

    Raises ConfigError as `check_output` does, before anything is written.
    """
    check_distinct([path for path, _ in files])
    for path, content in files:
        check_output(path, content)
        path.parent.mkdir(parents=True, exist_ok=True)

    for path, content in files:
        # Through a link: the rename of an atomic write would replace the link itself.
        write_atomically(Path(os.path.realpath(path)), [content])


def sync_path(path: Path) -> None:
    """Flushes a file, or the renames and new names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_line(record: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline.

    A lone surrogate becomes its JSON escape. NaN and Inf raise ValueError.
    """
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def complete_lines(path: Path) -> Iterator[bytes]:
    """The lines that end in a newline, without it; none if there is no file.

    Skips a last line that a kill cut.
    """
    if not is_file(path):
        return
    for line in read_lines(path):
        if line.endswith(b"\n"):
            yield line[:-1]


def parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of `lines`. Raises DataError with the number of a line that is not one."""
    for number, line in enumerate(lines, start=1):
        yield parse_line(line, path, number)


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The JSON object of line `number` (1-based) of a file. Raises DataError with the number."""
    value = parse_json(line, str(path), line=number, any_text=True)
    return as_object(value, f"{path}:{number}")


Fields = Mapping[str, type | UnionType]
"""Keys of a row, with the types of their values."""


def read_rows(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """The objects that have all `fields`; none if there is no file. Skips incomplete lines."""
    if not is_file(path):
        return []

    rows = []
    for line in read_bytes(path).decode(errors="replace").split("\n"):
        try:
            row = parse_json(line, str(path))
        except DataError:
            continue
        if isinstance(row, dict) and has_fields(row, fields):
            rows.append(row)
    return rows


def has_fields(row: Mapping[str, Any], fields: Fields) -> bool:
    """Whether `row` has all `fields`, each of its type."""
    return all(isinstance(row.get(key), kind) for key, kind in fields.items())
