"""Rows of a data set, each with the place it came from, so that an error can name file and line.

Local files are parsed here rather than by `datasets`: it would copy them into the user's cache, guess one type for a
column of mixed answers, and say of a malformed line only that there is one.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.errors import ConfigError, DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FORMATS = ".json (an array of objects), .jsonl (an object a line), .parquet, a folder or a hub id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: its 0-based number in the data set, and `file:line` or the like for messages."""

    index: int
    where: str
    values: Mapping[str, Any]


def read_rows(options: DatasetOptions) -> list[Row]:
    """All rows of the data set, the first `options.limit` if that is set; at least one.

    Raises DataError when the file is missing, empty, of another format or malformed (with its line), or the hub does
    not give the data set; ConfigError when an option is set that the source does not use.
    """
    path = Path(options.path).expanduser()
    if path.suffix in _READERS:
        _refuse_hub_options(options, ("split", "subset", "revision"), "a file")
        if not path.is_file():
            raise DataError(f"{path}: no such data file; correct the path (relative to {Path.cwd()})")
        rows = _READERS[path.suffix](path)
    elif path.is_dir():
        _refuse_hub_options(options, ("revision",), "a folder")
        with tempfile.TemporaryDirectory(prefix="pacs-data-") as cache:
            return _checked(_read_with_datasets(options, str(path), cache), options)
    elif path.exists():
        raise DataError(f"{path}: {path.suffix or 'no suffix'} is no supported data file; expected {_FORMATS}")
    elif _HUB_ID.fullmatch(options.path):
        rows = _read_with_datasets(options, options.path, None)
    else:
        raise DataError(f"{path}: no such file or folder, and no hub id; expected {_FORMATS}")
    return _checked(rows, options)


def _checked(rows: Iterator[Row], options: DatasetOptions) -> list[Row]:
    found = list(islice(rows, options.limit))
    if not found:
        raise DataError(f"{options.path}: has no rows; expected at least one problem")
    return found


def _refuse_hub_options(options: DatasetOptions, names: tuple[str, ...], kind: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value != DatasetOptions.model_fields[name].default:
            raise ConfigError(f"{options.path}: {name}={value} is not used by {kind}; remove it")


# ------------------------------------------------------------------------------------------------------------ local files
def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty; expected at least one problem")
    return text


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object with named columns, got {type(value).__name__}")
    return value


def _read_jsonl(path: Path) -> Iterator[Row]:
    index = 0
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: malformed JSON at column {error.colno}: {error.msg}; repair or remove the line"
            ) from error
        yield Row(index=index, where=where, values=_object(value, where))
        index += 1


def _read_json(path: Path) -> Iterator[Row]:
    """Element by element, so that each row knows its line."""
    text = _text(path)
    position = _skip(text, 0)
    if text[position] != "[":
        raise DataError(f"{path}: expected an array of objects, got {text[position]!r} first; is it .jsonl?")
    decoder = json.JSONDecoder()
    position, line, counted, index = _skip(text, position + 1), 1, 0, 0
    if text[position : position + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, position), position
        where = f"{path}:{line} (row {index})"
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{error.lineno}: malformed JSON at column {error.colno} in row {index}: {error.msg}; repair it"
            ) from error
        yield Row(index=index, where=where, values=_object(value, where))
        index += 1
        position = _skip(text, end)
        mark = text[position : position + 1]
        if mark == "]":
            return
        if mark != ",":
            place = line + text.count("\n", counted, position)
            raise DataError(
                f"{path}:{place}: malformed JSON after row {index - 1}: expected ',' or ']', got "
                f"{mark or 'the end of the file'!r}; repair it"
            )
        position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    """First index from `position` on that is no white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; expected at least one problem")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            index = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield Row(index=index, where=f"{path} (row {index})", values=values)
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable parquet file: {_one_line(error)}; write it again") from error


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


# ----------------------------------------------------------------------------------------------------------- the library
def _read_with_datasets(options: DatasetOptions, path: str, cache: str | None) -> Iterator[Row]:
    import datasets

    try:
        table = datasets.load_dataset(
            path, name=options.subset, split=options.split, revision=options.revision, cache_dir=cache
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{options.path}: `datasets` could not load subset {options.subset or '(default)'}, split {options.split}: "
            f"{_one_line(error)}; check id, subset and split, or download it and give the file's path"
        ) from error
    for index, values in enumerate(table):
        yield Row(index=index, where=f"{options.path} {options.split} (row {index})", values=values)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
