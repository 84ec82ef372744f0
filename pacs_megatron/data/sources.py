"""Reads the rows of a data set, each with its place for error messages.

Local files are parsed here: `datasets` copies them into the user's cache, forces one type on a
column of mixed answers, and does not name the line of a malformed row.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.config.text import HUB_ID, local_path
from pacs_megatron.errors import ConfigError, DataError, shown
from pacs_megatron.runtime.json_reader import as_object, parse_json, read_lines, read_text
from pacs_megatron.runtime.waiting import hub_wait, report_wait

_FORMATS = ".json (an array of objects), .jsonl (one object per line), .parquet, a folder, a hub id or a file of the hub"
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/(.+\.(?:json|jsonl|parquet))", re.ASCII)
_MAX_CELL_BYTES = 2**26
_MAX_JSON_BYTES = 2**30
"""Maximum size of a .json file, which is read as a whole; a .jsonl file is read line by line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: its 0-based index in the data set, its place for messages, and its columns."""

    index: int
    where: str
    values: Mapping[str, Any]

    def wrong(self, column: str, expected: str) -> DataError:
        """The error for a column with another value than `expected`."""
        value = self.values.get(column)
        got = (
            "empty"
            if isinstance(value, str) and not value.strip()
            else f"{shown(value)} ({type(value).__name__})"
        )
        return DataError(
            f"{self.where}: column {column!r} is {got}, expected {expected}; correct or remove "
            "the row"
        )


def read_rows(options: DatasetOptions) -> list[Row]:
    """All rows of the data set, or the first `options.limit` of them; at least one.

    Raises DataError, and ConfigError for an option that this kind of source does not use.
    """
    path = find_source(options)
    hub_file = _HUB_FILE.fullmatch(options.path)
    kind = "a hub id" if path is None else "a folder" if path.is_dir() else "a file"
    unused = {"a folder": ("revision",), "a file": ("split", "subset", "revision")}.get(kind, ())
    for name in ("split", "subset") if hub_file else unused:
        if (value := getattr(options, name)) != DatasetOptions.model_fields[name].default:
            raise ConfigError(
                f"{options.path}: {name}={value} is not used by {'a file' if hub_file else kind}; "
                "remove it"
            )
    if hub_file:
        path = _download(options, *hub_file.groups())
    if path is None:
        found = _read_with_datasets(options, options.path, None)
    elif path.is_dir():
        with tempfile.TemporaryDirectory(prefix="pacs-data-") as cache:
            found = _read_with_datasets(options, str(path), cache)
    else:
        found = list(islice(_READERS[path.suffix](path), options.limit))
    if not found:
        raise DataError(f"{options.path}: is empty or has no rows; expected at least one problem")
    return found


def find_source(options: DatasetOptions) -> Path | None:
    """The local file or folder of a data set; None for the hub. Raises DataError for anything else."""
    path = local_path(options.path)
    if _HUB_FILE.fullmatch(options.path):
        return None
    if path.suffix not in _READERS and not path.exists():
        if HUB_ID.fullmatch(options.path):
            return None
        raise DataError(
            f"{options.path}: no such file or folder, and not a hub id; expected {_FORMATS}"
        )
    if not path.exists():
        raise DataError(f"{path}: no such data file; correct the path (relative to {Path.cwd()})")
    if not path.is_dir() and path.suffix not in _READERS:
        raise DataError(
            f"{path}: {path.suffix or 'no suffix'} is no supported data file; expected {_FORMATS}"
        )
    return path


def _read_jsonl(path: Path) -> Iterator[Row]:
    lines = (
        (number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip()
    )
    for index, (number, line) in enumerate(lines):
        where = f"{path}:{number}"
        values = as_object(parse_json(line.rstrip(b"\n"), str(path), line=number), where)
        yield Row(index=index, where=where, values=values)


def _read_json(path: Path) -> Iterator[Row]:
    text = read_text(path, max_bytes=_MAX_JSON_BYTES)
    if not text.lstrip().startswith("["):
        raise DataError(
            f"{path}: expected an array of objects, got {text.lstrip()[:1]!r} first; is it .jsonl?"
        )
    for index, value in enumerate(parse_json(text, str(path))):
        where = f"{path} (row {index})"
        yield Row(index=index, where=where, values=as_object(value, where))


def _check_sizes(metadata: Any, path: Path) -> None:
    """Raises DataError, before it is unpacked, for a column whose values have on average more than
    `_MAX_CELL_BYTES`.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.total_uncompressed_size > _MAX_CELL_BYTES * max(1, column.num_values):
                found = f"{column.total_uncompressed_size} bytes in {column.num_values} values"
                raise DataError(
                    f"{path}: column {shown(column.path_in_schema)} has {found}; at most "
                    f"{_MAX_CELL_BYTES} bytes a value are read; remove the large values"
                )


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            index = 0
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(
                    f"{path}: {len(names)} columns, {shown(twice[0])} is repeated; rename one of "
                    "them"
                )
            _check_sizes(file.metadata, path)
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield Row(index=index, where=f"{path} (row {index})", values=values)
                    index += 1
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # ValueError: text that is not UTF-8
        raise DataError(
            f"{path}: not a readable parquet file: {_one_line(error)}; write it again"
        ) from error


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _read_with_datasets(options: DatasetOptions, path: str, cache: str | None) -> list[Row]:
    import datasets

    try:
        with (
            hub_wait(f"data set {options.path}")
            if cache is None
            else report_wait(f"for {path} to be read")
        ):
            table = datasets.load_dataset(
                path,
                name=options.subset,
                split=options.split,
                revision=options.revision,
                cache_dir=cache,
            )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{options.path}: `datasets` could not load subset {options.subset or '(default)'}, "
            f"split {options.split}: "
            f"{_one_line(error)}; check id, subset and split, or download it and use the file's "
            "path"
        ) from error
    where = f"{options.path} {options.split}"
    rows = enumerate(islice(table, options.limit))
    return [
        Row(index=index, where=f"{where} (row {index})", values=values) for index, values in rows
    ]


def _download(options: DatasetOptions, repository: str, name: str) -> Path:
    """The local copy of one file of a hub data set, for repositories whose loader is a script.

    Raises DataError.
    """
    from huggingface_hub import hf_hub_download

    try:
        with hub_wait(f"data set {options.path}"):
            return Path(
                hf_hub_download(repository, name, repo_type="dataset", revision=options.revision)
            )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{options.path}: no such file in the hub or the local cache, revision "
            f"{options.revision or 'main'}: "
            f"{_one_line(error)}; check path and revision, or run `pacs-megatron fetch` on a "
            "machine with network"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
