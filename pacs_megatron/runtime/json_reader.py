"""Reads all JSON that comes from outside of this process.

Every fault raises the caller's error class with one line: special files, size, encoding, malformed
JSON, text after the value, repeated keys, depth, huge numbers, NaN, and strings that no file name
can contain (NUL, lone surrogates).
"""

import json
import math
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pacs_megatron.errors import DataError, PacsError, shown

MAX_JSON_BYTES = 256 * 2**20
MAX_JSON_DEPTH = 64
MAX_JSON_DIGITS = 300
"""Of one number; an integer below the limit always fits into a float."""

_TOO_DEEP = f"nested deeper than {MAX_JSON_DEPTH} levels; write it flatter"
_SPACE = " \t\r\n"
_LFS_START = b"version https://git-lfs.github.com/spec/"


class _RejectedError(ValueError):
    """A value that JSON's grammar allows and this reader rejects."""


def read_object(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """The object of a JSON file. Raises `error`."""
    text = read_text(path, error=error, max_bytes=max_bytes)
    return as_object(parse_json(text, str(path), error=error), str(path), error=error)


def parse_json(
    text: str | bytes,
    where: str,
    *,
    line: int | None = None,
    error: type[PacsError] = DataError,
    any_text: bool = False,
) -> Any:
    """The one JSON value of `text`.

    Args:
        text: The document, with white space around it.
        where: Source of the text, for messages.
        line: Number of the text's first line in the source; None if the text is the whole source.
        error: Class of the error that is raised.
        any_text: Strings may contain NUL and lone surrogates, as the responses of a model do.
    """
    if isinstance(text, bytes):
        text = _decode(text, where if line is None else f"{where}:{line}", error)

    start = len(text) - len(text.lstrip(_SPACE))
    position = start
    try:
        value, end = _DECODER.raw_decode(text, start)
        _check(value, any_text)
    except json.JSONDecodeError as failure:
        position = failure.pos
        problem = f"malformed JSON at column {failure.colno}: {failure.msg}; correct it"
    except RecursionError:
        problem = _TOO_DEEP
    except _RejectedError as failure:
        problem = str(failure)
    else:
        text_after = text[end:].lstrip(_SPACE)
        if not text_after:
            return value
        position = len(text) - len(text_after)
        problem = f"text after the JSON value ({shown(text_after)}); remove it"

    if line is not None or position > 0:
        number = (line or 1) + text.count("\n", 0, position)
        where = f"{where}:{number}"
    raise error(f"{where}: {problem}")


def as_object(value: Any, where: str, *, error: type[PacsError] = DataError) -> dict[str, Any]:
    """Returns `value` if it is a JSON object. Raises `error` otherwise."""
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), type(value).__name__)
        raise error(f"{where}: expected a JSON object, got {kind}")
    return value


def read_text(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_JSON_BYTES
) -> str:
    """A text file, without a byte order mark. Raises `error`."""
    return _decode(read_bytes(path, error=error, max_bytes=max_bytes), str(path), error)


def read_bytes(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_JSON_BYTES
) -> bytes:
    """The bytes of a file. Raises `error`."""
    with _regular(path, error) as (file, size):
        if size > max_bytes:
            raise error(f"{path}: {size} bytes; at most {max_bytes} are read")
        return file.read()


def read_lines(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_JSON_BYTES
) -> Iterator[bytes]:
    """The lines of a file of any size, one at a time, with their newlines.

    Raises `error` for a line of more than `max_bytes`.
    """
    with _regular(path, error) as (file, _):
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes:
                raise error(
                    f"{path}:{number}: a line of more than {max_bytes} bytes; is it a file of "
                    "lines?"
                )
            yield line


def check_content(path: Path, error: type[PacsError] = DataError) -> None:
    """Raises `error` if `path`, a regular file, is a pointer of git-lfs and not the file itself."""
    with path.open("rb") as file:
        if file.read(len(_LFS_START)) == _LFS_START:
            raise error(
                f"{path} is a pointer of git-lfs, not the file itself; run `git lfs pull` in its "
                "repository, or download the file"
            )


@contextmanager
def _regular(path: Path, error: type[PacsError]) -> Iterator[tuple[BinaryIO, int]]:
    """The open file and its size in bytes; a pipe or device is rejected before it is opened."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: not a regular file; correct the path")
        check_content(path, error)
        with path.open("rb") as file:
            yield file, status.st_size
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        reason = str(failure)
        if isinstance(failure, OSError) and failure.strerror:
            reason = failure.strerror
        raise error(f"{shown(str(path), limit=300)}: cannot read the file: {reason}") from failure


def _decode(content: bytes, where: str, error: type[PacsError]) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(
            f"{where}: byte {failure.start} is not UTF-8; save the file as UTF-8"
        ) from failure


def _number(text: str, kind: type[int] | type[float] = float) -> float:
    if len(text) > MAX_JSON_DIGITS:
        raise _RejectedError(
            f"a number of {len(text)} characters ({shown(text)}); at most {MAX_JSON_DIGITS} are "
            "read"
        )
    value = kind(text)
    if not math.isfinite(value):
        raise _RejectedError(f"the number {shown(text)} is too large for a 64-bit float")
    return value


def _constant(name: str) -> float:
    raise _RejectedError(f"{name} is no JSON number; write a finite number, or null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        _reject_repeated_key(pairs)
    return members


def _reject_repeated_key(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RejectedError(
                f"the key {shown(key)} is repeated in one object; keep one of them"
            )
        seen.add(key)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=partial(_number, kind=int),
    parse_float=_number,
    parse_constant=_constant,
)
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _check(value: Any, any_text: bool) -> None:
    """Checks depth and the text of keys and strings, level by level: recursion has a limit."""
    level = [value]
    depth = 0
    while level:
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
                if not any_text:
                    for key in item:
                        _check_text(key)
            elif isinstance(item, list):
                next_level += item
            elif isinstance(item, str) and not any_text:
                _check_text(item)

        level = next_level
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise _RejectedError(_TOO_DEEP)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise _RejectedError(f"the string {shown(text)} contains a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        place = f"character {failure.start}"
        raise _RejectedError(
            f"the string {shown(text)} contains a lone surrogate ({place}); remove it"
        ) from failure


@contextmanager
def parsing(where: str, error: type[PacsError]) -> Iterator[None]:
    """Raises `error` if the block fails because values are missing or of the wrong kind."""
    try:
        yield
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        AssertionError,
    ) as failure:
        raise error(
            f"{where} is malformed ({type(failure).__name__}: {failure}); restore it"
        ) from failure
