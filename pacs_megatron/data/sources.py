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

_FORMATS = (
    ".json (an array of objects), .jsonl (one object per line), .parquet, a folder, a hub id or a "
    "file of the hub"
)
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/(.+\.(?:json|jsonl|parquet))", re.ASCII)
_MAX_CELL_BYTES = 2**26
_MAX_ARRAY_BYTES = 2**30
"""Maximum size of a .json file, which is read as a whole; a .jsonl file is read line by line."""
_PARQUET_BATCH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One row: its 0-based index in the data set, its place for messages, and its columns."""

    index: int
    where: str
    values: Mapping[str, Any]

    def wrong(self, column: str, expected: str) -> DataError:
        """The error for a column with another value than `expected`."""
        value = self.values.get(column)
        is_empty = isinstance(value, str) and not value.strip()
        got = "empty" if is_empty else f"{shown(value)} ({type(value).__name__})"
        return DataError(
            f"{self.where}: column {column!r} is {got}, expected {expected}; correct or remove "
            "the row"
        )


def read_rows(options: DatasetOptions) -> list[DataRow]:
    """All rows of the data set, or the first `options.limit` of them; at least one.

    Raises:
        DataError: The source is missing, malformed or empty.
        ConfigError: An option that this kind of source does not use.
    """
    path = find_source(options)
    hub_file = _HUB_FILE.fullmatch(options.path)
    _check_options(options, path, is_hub_file=hub_file is not None)

    if hub_file is not None:
        repository, name = hub_file.groups()
        path = _download(options, repository, name)
    if path is None:
        rows = _read_with_datasets(options, options.path, None)
    elif path.is_dir():
        with tempfile.TemporaryDirectory(prefix="pacs-data-") as cache:
            rows = _read_with_datasets(options, str(path), cache)
    else:
        rows = list(islice(_READERS[path.suffix](path), options.limit))
    if not rows:
        raise DataError(f"{options.path}: is empty or has no rows; expected at least one problem")
    return rows


def _check_options(options: DatasetOptions, path: Path | None, *, is_hub_file: bool) -> None:
    """Raises ConfigError for an option without effect on this kind of source."""
    unused: tuple[str, ...]
    if is_hub_file:
        kind = "a file"
        unused = ("split", "subset")
    elif path is None:
        kind = "a hub id"
        unused = ()
    elif path.is_dir():
        kind = "a folder"
        unused = ("revision",)
    else:
        kind = "a file"
        unused = ("split", "subset", "revision")

    for name in unused:
        value = getattr(options, name)
        if value != DatasetOptions.model_fields[name].default:
            raise ConfigError(f"{options.path}: {name}={value} is not used by {kind}; remove it")


def find_source(options: DatasetOptions) -> Path | None:
    """The local file or folder of a data set; None for the hub.

    Raises DataError for anything else.
    """
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


def _read_jsonl(path: Path) -> Iterator[DataRow]:
    index = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        value = parse_json(line.rstrip(b"\n"), str(path), line=number)
        yield DataRow(index=index, where=where, values=as_object(value, where))
        index += 1


def _read_json(path: Path) -> Iterator[DataRow]:
    text = read_text(path, max_bytes=_MAX_ARRAY_BYTES)
    if not text.lstrip().startswith("["):
        raise DataError(
            f"{path}: expected an array of objects, got {text.lstrip()[:1]!r} first; is it .jsonl?"
        )
    for index, value in enumerate(parse_json(text, str(path))):
        where = f"{path} (row {index})"
        yield DataRow(index=index, where=where, values=as_object(value, where))


def _read_parquet(path: Path) -> Iterator[DataRow]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, path)
            _check_sizes(file.metadata, path)
            index = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                for values in batch.to_pylist():
                    yield DataRow(index=index, where=f"{path} (row {index})", values=values)
                    index += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # ValueError: text that is not UTF-8.
        raise DataError(
            f"{path}: not a readable parquet file: {_one_line(error)}; write it again"
        ) from error


def _check_names(names: list[str], path: Path) -> None:
    """Raises DataError for two columns of one name, of which a row would have the last."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(
            f"{path}: {len(names)} columns, {shown(repeated[0])} is repeated; rename one of them"
        )


def _check_sizes(metadata: Any, path: Path) -> None:
    """Raises DataError, before it is unpacked, for a column whose values have on average more than
    `_MAX_CELL_BYTES`.
    """
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for column_number in range(group.num_columns):
            column = group.column(column_number)
            num_bytes = column.total_uncompressed_size
            if num_bytes > _MAX_CELL_BYTES * max(1, column.num_values):
                raise DataError(
                    f"{path}: column {shown(column.path_in_schema)} has {num_bytes} bytes in "
                    f"{column.num_values} values; at most {_MAX_CELL_BYTES} bytes a value are "
                    "read; remove the large values"
                )


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _read_with_datasets(options: DatasetOptions, path: str, cache: str | None) -> list[DataRow]:
    """The rows of a hub id, or of a folder.

    Args:
        options: Subset, split, revision and limit.
        path: Hub id or folder.
        cache: Folder for the copies of a local folder's files; None uses the user's cache.
    """
    import datasets

    if cache is None:
        wait = hub_wait(f"data set {options.path}")
    else:
        wait = report_wait(f"for {path} to be read")
    try:
        with wait:
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
            f"split {options.split}: {_one_line(error)}; check id, subset and split, or download "
            "it and use the file's path"
        ) from error

    rows = []
    for index, values in enumerate(islice(table, options.limit)):
        where = f"{options.path} {options.split} (row {index})"
        rows.append(DataRow(index=index, where=where, values=values))
    return rows


def _download(options: DatasetOptions, repository: str, name: str) -> Path:
    """The local copy of one file of a hub data set, for repositories whose loader is a script.

    Raises DataError.
    """
    from huggingface_hub import hf_hub_download

    try:
        with hub_wait(f"data set {options.path}"):
            file = hf_hub_download(repository, name, repo_type="dataset", revision=options.revision)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{options.path}: no such file in the hub or the local cache, revision "
            f"{options.revision or 'main'}: {_one_line(error)}; check path and revision, or run "
            "`pacs-megatron fetch` on a machine with network"
        ) from error
    return Path(file)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
