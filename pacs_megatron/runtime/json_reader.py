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

MAX_BYTES = 256 * 2**20
MAX_DEPTH = 64
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels; write it flatter"
MAX_DIGITS = 300
"""Of one number; an integer below the limit always fits into a float."""

_SPACE = " \t\r\n"


class _RefusedError(ValueError):
    """A value that JSON's grammar allows and this reader rejects."""


def read_object(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """The object of a JSON file. Raises `error`."""
    value = parse_json(read_text(path, error=error, max_bytes=max_bytes), str(path), error=error)
    return as_object(value, str(path), error=error)


def parse_json(
    text: str | bytes,
    where: str,
    *,
    line: int | None = None,
    error: type[PacsError] = DataError,
    any_text: bool = False,
) -> Any:
    """The one JSON value of `text`, which comes from `where`, and there from `line` on.

    With `any_text`, strings may contain NUL and lone surrogates, as the responses of a model do.
    """
    if isinstance(text, bytes):
        text = _decode(text, where if line is None else f"{where}:{line}", error)
    position = start = len(text) - len(text.lstrip(_SPACE))
    try:
        value, end = _DECODER.raw_decode(text, start)
        _check(value, any_text)
        rest = text[end:].lstrip(_SPACE)
        if not rest:
            return value
        position = len(text) - len(rest)
        problem = f"text after the JSON value ({shown(rest)}); remove it"
    except json.JSONDecodeError as found:
        position = found.pos
        problem = f"malformed JSON at column {found.colno}: {found.msg}; correct it"
    except RecursionError:
        problem = _TOO_DEEP
    except _RefusedError as found:
        problem = str(found)
    place = (
        ""
        if line is None and position == 0
        else f":{(line or 1) + text.count(chr(10), 0, position)}"
    )
    raise error(f"{where}{place}: {problem}")


def as_object(value: Any, where: str, *, error: type[PacsError] = DataError) -> dict[str, Any]:
    """`value` where it is a JSON object. Raises `error` otherwise."""
    if not isinstance(value, dict):
        raise error(
            f"{where}: expected a JSON object, got {_KINDS.get(type(value), type(value).__name__)}"
        )
    return value


def read_text(path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_BYTES) -> str:
    """A text file, without a byte order mark. Raises `error`."""
    return _decode(read_bytes(path, error=error, max_bytes=max_bytes), str(path), error)


def read_bytes(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_BYTES
) -> bytes:
    """As `read_text`, the bytes."""
    with _regular(path, error) as (file, size):
        if size > max_bytes:
            raise error(f"{path}: {size} bytes; at most {max_bytes} are read")
        return file.read()


def read_lines(
    path: Path, *, error: type[PacsError] = DataError, max_bytes: int = MAX_BYTES
) -> Iterator[bytes]:
    """The lines of a file of any size, one at a time, with their newlines.

    Raises `error` for one of over `max_bytes`.
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


@contextmanager
def _regular(path: Path, error: type[PacsError]) -> Iterator[tuple[BinaryIO, int]]:
    """(the open file, its bytes); a pipe or device is rejected before it is opened."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: not a regular file; correct the path")
        with path.open("rb") as file:
            yield file, status.st_size
    except (OSError, ValueError) as found:  # ValueError: a NUL in the path
        reason = found.strerror if isinstance(found, OSError) and found.strerror else str(found)
        raise error(f"{shown(str(path), limit=300)}: cannot read the file: {reason}") from found


def _decode(content: bytes, where: str, error: type[PacsError]) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as found:
        raise error(f"{where}: byte {found.start} is not UTF-8; save the file as UTF-8") from found


def _number(text: str, kind: type[int] | type[float] = float) -> float:
    if len(text) > MAX_DIGITS:
        raise _RefusedError(
            f"a number of {len(text)} characters ({shown(text)}); at most {MAX_DIGITS} are read"
        )
    value = kind(text)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {shown(text)} is too large for a 64-bit float")
    return value


def _constant(name: str) -> float:
    raise _RefusedError(f"{name} is no JSON number; write a finite number, or null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(f"the key {shown(twice)} is repeated in one object; keep one of them")
    return found


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
}
_KINDS[type(None)] = "null"


def _check(value: Any, any_text: bool) -> None:
    """Level by level: depth, and the text of every key and string."""
    level = [value]
    depth = 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
            for text in item if isinstance(item, dict) else (item,):
                if isinstance(text, str) and not any_text:
                    _check_text(text)
        level = below
        depth = depth + 1
        if depth > MAX_DEPTH:
            raise _RefusedError(_TOO_DEEP)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise _RefusedError(f"the string {shown(text)} contains a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as found:
        place = f"character {found.start}"
        raise _RefusedError(
            f"the string {shown(text)} contains a lone surrogate ({place}); remove it"
        ) from found


@contextmanager
def parsing(where: str, error: type[PacsError]) -> Iterator[None]:
    """Raises `error` where the block finds that values lack a part, or have one of a wrong kind."""
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
    ) as fault:
        raise error(
            f"{where} is malformed ({type(fault).__name__}: {fault}); restore it"
        ) from fault
