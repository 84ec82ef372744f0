"""Files of JSON lines, possibly damaged by the loss of a node."""

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from pacs_megatron.errors import DataError
from pacs_megatron.runtime.json_reader import MAX_BYTES, parse_json

Fields = Mapping[str, type | UnionType]
"""Keys of a row, with the types of their values."""


def read_rows(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """The objects that have all `fields`; none if there is no file. Skips incomplete lines."""
    if not path.is_file():
        return []
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
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
