"""Reads the rows of a data set, each with its place for error messages.

Local files are parsed here: `datasets` copies them into the user's cache, forces one type on a
column of mixed answers, and does not name the line of a malformed row.
"""

import difflib
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pacs_megatron.config.schema import DatasetOptions, RowCondition
from pacs_megatron.config.text import HUB_ID, local_path, near_file
from pacs_megatron.errors import ConfigError, DataError, shown
from pacs_megatron.runtime.json_reader import (
    as_object,
    check_content,
    parse_json,
    read_lines,
    read_text,
)
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
_MAX_NAMES = 30
"""Columns that a message lists"""


_MISSING = object()
"""The value of a column that a row does not have"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One row: its 0-based index in the data set, its place for messages, and its columns."""

    index: int
    where: str
    values: Mapping[str, Any]
    choice_order: int = 0
    """number of the order of the choices of a multiple-choice problem"""

    def has(self, column: str) -> bool:
        """Whether the row has the column, or the place inside one (`get`)."""
        return self._find(column) is not _MISSING

    def get(self, column: str) -> Any:
        """The value of a column, None if the row has none.

        A name with dots is a place inside a column of maps and lists, such as
        `reward_model.ground_truth` or `messages.0.content`, unless a column has that name.
        """
        value = self._find(column)
        return None if value is _MISSING else value

    def _find(self, column: str) -> Any:
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for part in column.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return _MISSING
        return value

    def missing(self, columns: Sequence[str]) -> str:
        """Why none of `columns` is found, for messages: the columns of the row, and one that is
        spelled alike or has that name inside.
        """
        names = self._names()
        close = [
            *(name for name in names if name.rpartition(".")[2] in columns),
            *(name for name in names if name.strip().casefold() == columns[0].strip().casefold()),
            *difflib.get_close_matches(columns[0], names, n=1),
        ]
        listed = ", ".join(map(repr, names[:_MAX_NAMES])) or "none"
        hint = f"; did you mean {close[0]!r}?" if close else ""
        wanted = " or ".join(map(repr, columns))
        return f"{self.where}: no column {wanted}, it has {listed}{hint}"

    def _names(self) -> list[str]:
        """The columns; of a column of maps also the places inside it."""
        names = []
        for column, value in self.values.items():
            names.append(column)
            if isinstance(value, Mapping):
                names += [f"{column}.{part}" for part in value]
        return names

    def wrong(self, column: str, expected: str) -> DataError:
        """The error for a column with another value than `expected`."""
        value = self.get(column)
        is_empty = isinstance(value, str) and not value.strip()
        got = "empty" if is_empty else f"{shown(value)} ({type(value).__name__})"
        return DataError(
            f"{self.where}: column {column!r} is {got}, expected {expected}; correct or remove "
            "the row"
        )


@dataclass(frozen=True, slots=True)
class DataRows:
    """The rows of a data set that match `where`."""

    used: list[DataRow]
    num_filtered: int
    """rows that do not match, up to the last row that was read"""


def read_rows(options: DatasetOptions) -> DataRows:
    """The rows of the data set that match `options.where`, at most `options.limit`; at least one.

    The index of a row counts all rows of all files, so it does not depend on `where`.

    Raises:
        DataError: The source is missing, malformed or empty, no row matches, or a column of `where`
            is missing or has a value of another kind.
        ConfigError: An option that this kind of source does not use.
    """
    used: list[DataRow] = []
    num_filtered = 0
    num_before = 0
    for path in options.paths:
        if len(used) == options.limit:
            break
        num_read = 0
        for row in _rows_of(options, path):
            num_read += 1
            if not matches(row, options.where):
                num_filtered += 1
                continue
            used.append(replace(row, index=num_before + row.index))
            # Before the next row is parsed.
            if len(used) == options.limit:
                break
        if not num_read:
            raise DataError(f"{path}: is empty or has no rows; expected at least one problem")
        num_before += num_read

    if not used:
        conditions = ", ".join(options.where)
        raise DataError(
            f"{options.path}: none of {num_filtered} rows matches `where` ({conditions}); correct "
            "its values"
        )
    return DataRows(used, num_filtered)


def matches(row: DataRow, where: Mapping[str, RowCondition]) -> bool:
    """Whether every column of `where` has one of its values.

    Raises DataError if a column is missing, or has no number or day to compare.
    """
    return all(_column_matches(row, name, condition) for name, condition in where.items())


def _column_matches(row: DataRow, name: str, condition: RowCondition) -> bool:
    if not row.has(name):
        raise DataError(f"{row.missing([name])}; correct `where`")
    value = row.get(name)
    if condition.one_of is not None:
        return any(type(value) is type(item) and value == item for item in condition.one_of)

    is_day = isinstance(condition.min, str) or isinstance(condition.max, str)
    comparable: Any = _day(row, name) if is_day else _number(row, name)
    is_above = condition.min is None or comparable >= condition.min
    is_below = condition.max is None or comparable <= condition.max
    return is_above and is_below


def _day(row: DataRow, name: str) -> str:
    """The day of a date or time, as `2024-07-01`, which sorts as text."""
    value = row.get(name)
    with suppress(ValueError):
        if isinstance(value, str):
            value = datetime.fromisoformat(value.strip())
    if not isinstance(value, date):
        raise row.wrong(name, "a date or time of ISO 8601, for `where`")
    return value.isoformat()[:10]


def _number(row: DataRow, name: str) -> float:
    value = row.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise row.wrong(name, "a number, for `where`")
    number: float = value
    return number


def _rows_of(options: DatasetOptions, path_text: str) -> Iterator[DataRow]:
    """The rows of one file, or of the hub id or folder."""
    one = options.model_copy(update={"path": path_text})
    path = find_source(path_text)
    hub_file = _HUB_FILE.fullmatch(path_text)
    _check_options(one, path, is_hub_file=hub_file is not None)
    is_file = hub_file is not None or (path is not None and not path.is_dir())
    if options.more_paths and not is_file:
        raise ConfigError(
            f"{path_text}: more_paths is for files, this is a folder or a hub id; remove more_paths"
        )

    if hub_file is not None:
        repository, name = hub_file.groups()
        path = _download(one, repository, name)
    if path is None:
        yield from _read_with_datasets(one, path_text, None)
    elif path.is_dir():
        with tempfile.TemporaryDirectory(prefix="pacs-data-") as cache:
            yield from _read_with_datasets(one, str(path), cache)
    else:
        yield from _READERS[path.suffix](path)


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


def find_source(text: str) -> Path | None:
    """The local file or folder of a path of a data set; None for the hub.

    Raises DataError for anything else.
    """
    path = local_path(text)
    if _HUB_FILE.fullmatch(text):
        return None
    if "://" in text and not text.startswith("hf://"):
        raise DataError(
            f"{text}: addresses are not read; give the path of a local file, a hub id, or "
            "hf://datasets/OWNER/NAME/FILE"
        )
    if path.suffix not in _READERS and not path.exists():
        if HUB_ID.fullmatch(text):
            return None
        raise DataError(f"{text}: no such file or folder, and not a hub id; expected {_FORMATS}")
    if not path.exists():
        hint = near_file(path)
        if "$" in text:
            hint = "; variables such as $HOME are not replaced here"
        elif "*" in text:
            hint = "; patterns are not expanded: list the files in more_paths, or give a folder"
        raise DataError(
            f"{path}: no such data file; correct the path (relative to {Path.cwd()}){hint}"
        )
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
        if not index:
            _check_first_line(line, where)
        value = parse_json(line.rstrip(b"\n"), str(path), line=number)
        yield DataRow(index=index, where=where, values=as_object(value, where))
        index += 1


_OTHER_KINDS = {
    b"\x1f\x8b": "the file is compressed by gzip; unpack it",
    b"PK\x03\x04": "the file is a zip archive; unpack it",
    b"PAR1": "the file is a parquet file; give it a name that ends with .parquet",
    b"<!doctype": "the file is a web page; download the data itself",
    b"<html": "the file is a web page; download the data itself",
}
"""First bytes of files that are often saved as .jsonl -> what to do"""


def _check_first_line(line: bytes, where: str) -> None:
    """Raises DataError if the first line shows another kind of file."""
    for start, fix in _OTHER_KINDS.items():
        if line[: len(start)].lower() == start.lower():
            raise DataError(f"{where}: {fix}")
    text = line.decode("utf-8", "replace").lstrip("\ufeff").strip()
    if text.startswith("["):
        raise DataError(
            f"{where}: expected a JSON object, got an array; name a file with one array .json"
        )
    # A damaged object, or bytes that are no text, have their own messages.
    if not text.startswith("{") and text.isprintable() and ("," in text or ";" in text):
        raise DataError(
            f"{where}: expected a JSON object, got {shown(text)}; is it a table of a spreadsheet? "
            "Save it as .parquet or .jsonl"
        )


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

    if path.is_file():
        check_content(path)
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
    """The rows of a hub id, or of a folder: up to the limit, where `where` is empty.

    Args:
        options: Subset, split, revision, where and limit.
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
    limit = None if options.where else options.limit
    for index, values in enumerate(islice(table, limit)):
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
